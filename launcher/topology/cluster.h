// Stores hosts in a file, to place ranks on a cluster, or draw it, from another machine. `topology --save` writes the
// file and `topology --load` reads it; the reports of hosts (launcher/hosts/host_report.h) use the same format.
//
// Format: JSON, {"format": "annulus cluster", "version": 1, "hosts": [...]}, with a line for each host, in the order of
// the job. A host has
//
// - host, cuda, visible_devices: its name; whether ranks can compute on its GPUs; CUDA_VISIBLE_DEVICES there, or null;
// - packages: id (the system's, as everywhere here), model, cpus: processors, "0-3,8";
// - numa_nodes: id, package, memory_bytes, cpus; cores: package, numa, cpus;
// - cpu_quota: processors whose time its control group allows, 1.5; missing: all of them;
// - gpus: pci (bus id), model, memory_bytes, pci_gigabytes_per_s, numa (nodes near it), bridges (above it, the host
//   bridge first);
// - links, [GPU][GPU]: kind (self, NVLink, PCI switch, PCI root, socket, system), megabytes_per_s, an estimate;
// - nvswitches: number of NVSwitches that the NVLinks lead to; 0: none, or not known;
// - nics: name, interface, pci, rdma, active, port (the first that is), numa, bridges, ports: number, active, ethernet
//   (RoCE, not InfiniBand), megabits_per_s;
// - interfaces: name, up, loopback, megabits_per_s, addresses ("10.0.0.1/24"), pci.
//
// memory_bytes of a host, and cpus of packages and NUMA nodes, follow from the rest and are not read.
// Thread safety: functions without state.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launcher/topology/host.h"

namespace annulus {

// Serializes a host: host_from_json(host_to_json(h), ...) equals h, except for machine.is_this_system, which is false.
nlohmann::json host_to_json(const Host& host);
// Parses an untrusted host. Raises Error(kInput), which names `source` and the missing or invalid member.
Host host_from_json(const nlohmann::json& json, const std::string& source);

// Replaces the file atomically. Raises Error(kResource) for I/O errors.
void write_cluster(const std::string& path, const std::vector<Host>& hosts);
// Raises Error(kInput), which names the file, if it is invalid or larger than 64 MiB.
std::vector<Host> read_cluster(const std::string& path);

}  // namespace annulus
