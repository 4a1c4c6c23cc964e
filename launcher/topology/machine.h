// Machine: the topology of one host as plain data: packages, NUMA nodes, cores, GPUs, NICs, and the links between GPUs.
// `place` computes a Placement from it, and the subcommand `topology` prints it. It is independent of the hardware, so
// a node of 8 GPUs can be planned for on a laptop.
//
// hwloc provides it: from this machine, from an XML file that `lstopo file.xml` wrote on another, or from a synthetic
// description. Thread safety: plain data; loading this machine only reads from the kernel.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/topology/cpu_set.h"

namespace annulus {

// Limits above any machine's; descriptions that exceed them are rejected.
constexpr size_t kMaxGpus = 1024;  // the link matrix is quadratic
constexpr size_t kMaxNics = 4096;
constexpr size_t kMaxNvswitches = 1024;
constexpr int kMaxNumaNodes = 4096;
constexpr int kMaxRdmaPorts = 255;

struct Package {
  int id = 0;  // the kernel's number
  std::string model;
  CpuSet cpus;
  bool operator==(const Package&) const = default;
};

struct NumaNode {
  int id = 0;       // the kernel's number, as for numactl and mbind
  int package = 0;  // index into Machine::packages
  int64_t memory_bytes = 0;
  CpuSet cpus;  // of the cores local to this node; may be empty
  bool operator==(const NumaNode&) const = default;
};

struct Core {
  int package = 0;       // index into Machine::packages
  int numa = 0;          // index into Machine::numa_nodes
  std::vector<int> pus;  // hardware threads, ascending, never empty
  bool operator==(const Core&) const = default;
};

// The bridges above a device, host bridge first, by numbers that are unique within the machine.
using PciPath = std::vector<int64_t>;

struct Gpu {
  std::string pci;                 // "0000:1b:00.0", lower case
  std::string model;               // "NVIDIA H200", or "NVIDIA 10de:2335" if only the PCI ids are known
  int64_t memory_bytes = 0;        // 0: unknown
  double pci_gigabytes_per_s = 0;  // of its PCI link; 0: unknown
  std::vector<int> numa;           // near nodes, indices into Machine::numa_nodes; all if unknown
  PciPath path;
  bool operator==(const Gpu&) const = default;
};

// A port of an RDMA device.
struct RdmaPort {
  int number = 1;
  bool active = false;
  bool ethernet = false;       // RoCE; otherwise InfiniBand
  int64_t megabits_per_s = 0;  // 0: unknown
  bool operator==(const RdmaPort&) const = default;
};

struct Nic {
  std::string name;       // "mlx5_0" for an RDMA device, otherwise the network interface
  std::string interface;  // "ib0", "eth0"; empty if there is none
  std::string pci;
  bool rdma = false;
  bool active = true;           // false if the ports are known and none is up
  int port = 0;                 // of an RDMA device: the first that is up; 0: unknown
  std::vector<RdmaPort> ports;  // of an RDMA device, by number; empty: unknown
  std::vector<int> numa;
  PciPath path;
  bool operator==(const Nic&) const = default;

  // Sets the ports, and derives `active` and `port`.
  void set_ports(std::vector<RdmaPort> ports);
};

// The path between two GPUs of a host, best first.
enum class LinkKind { kSelf, kNvlink, kPciSwitch, kPciRoot, kPackage, kSystem };
std::string_view to_string(LinkKind kind);  // "self", "NVLink", "PCI switch", "PCI root", "socket", "system"

struct Link {
  LinkKind kind = LinkKind::kSystem;
  // For NVLink, the bandwidth reported by hwloc or the driver. For other kinds, an estimate that serves only to rank
  // links: the fastest PCI link of any GPU of the host (idle GPUs reduce the speed of their own; 32 GB/s if none is
  // reported), times 1, 3/4, 1/2 or 1/4 for switch, root, package and system.
  int64_t megabytes_per_s = 0;
  bool operator==(const Link&) const = default;
};

struct Machine {
  std::string host;
  bool is_this_system = false;           // read from the running kernel, so processes can be bound to it
  std::vector<Package> packages;         // never empty; by id
  std::vector<NumaNode> numa_nodes;      // never empty; by (package, id)
  std::vector<Core> cores;               // never empty; by NUMA node, then in hwloc's order; allowed PUs only
  std::vector<Gpu> gpus;                 // distinct, by PCI bus id
  std::vector<Nic> nics;                 // by PCI bus id
  std::vector<std::vector<Link>> links;  // [gpu][gpu], symmetric
  int nvswitches = 0;                    // NVSwitches connected to these GPUs; 0: none or unknown
  // The CPU quota of this process's control group in processors (common/control_groups/), such as 1.5 in a container;
  // 0: it does not limit the allowed processors.
  double cpu_quota = 0;

  bool operator==(const Machine&) const = default;

  CpuSet cpus() const;  // all allowed PUs
  int64_t memory_bytes() const;

  // Sets the processors of packages and NUMA nodes from those of the cores.
  void set_cpus();

  // Describes this process's machine, restricted to the processors of its cgroup and, with `respect_affinity`, of its
  // current affinity mask (taskset). Pass false in a rank that mpirun or srun has already bound, whose mask is its own
  // share and not the processors of all ranks of the host. hwloc honors HWLOC_XMLFILE and HWLOC_SYNTHETIC; the result
  // then has is_this_system = false. Errors: kUnavailable.
  static Machine this_machine(bool respect_affinity = true);

  // Reads an untrusted file written by lstopo, in a format of this hwloc or an older one (hwloc 2 reads 1.x and 2.x).
  // Raises Error(kInput), which names it, if it is missing, larger than 64 MiB, not XML, truncated, in a newer format,
  // without processors or inconsistent. hwloc crashes on some inconsistent files, so a forked child reads the file
  // first; call this before MPI is initialized.
  static Machine from_xml(const std::string& path);
  // Parses the text of such a file. `source` names it in messages, and the host if the text does not.
  static Machine from_xml_text(std::string_view xml, const std::string& source);

  // Parses hwloc's synthetic description, "pack:2 [numa] l3:1 core:4 pu:2", which has no devices. Errors: kInput.
  static Machine from_synthetic(const std::string& description, const std::string& host = "synthetic");

  // Keeps only the given GPUs, adds those that hwloc did not find (near every node), and sorts by PCI bus id. add_nvml
  // passes the GPUs that the driver reports, because in a container the PCI bus also has GPUs that the process cannot
  // open; launcher/launch/rank_place.cc passes those that CUDA reports. Any spelling of an id is accepted
  // ("00000000:1B:00.0"). Errors: kInput for an invalid PCI bus id, or for more than 1,024 GPUs.
  void set_visible_gpus(const std::vector<std::string>& pci_bus_ids);

  // Removes the RDMA devices that are not in `hcas` ("mlx5_0" or "mlx5_0:1"); a port given there becomes Nic::port.
  void keep_hcas(const std::vector<std::string>& hcas);

  // Removes the GPUs that CUDA would hide for a value of CUDA_VISIBLE_DEVICES, without calling CUDA. This requires a
  // list of numbers and GPUs of one model, which CUDA numbers by PCI bus id. As in CUDA, the list ends before the first
  // invalid number. Any other list (UUIDs, MIG) changes nothing.
  void hide_gpus_from_cuda(std::string_view visible_devices);
};

// Converts "00000000:1B:00.0", "0000:1b:00.0" or "1b:00.0" to "0000:1b:00.0". Errors: kInput.
std::string normalize_pci_bus_id(std::string_view id);

// Returns the distance of two devices of a host by the PCI tree and the packages alone (never kNvlink).
LinkKind pci_distance(const Machine& machine, const PciPath& a_path, const std::vector<int>& a_numa,
                      const PciPath& b_path, const std::vector<int>& b_numa);

}  // namespace annulus
