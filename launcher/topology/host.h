// Host: a Machine, whether ranks can use its GPUs, and its network interfaces. Used by `topology`, `doctor` and
// `launch`; cluster.h stores several in a file.
//
// Thread safety: plain data and functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/topology/machine.h"

namespace annulus {

// An IP interface.
struct NetInterface {
  std::string name;  // "eth0"
  bool up = false;
  bool loopback = false;
  int64_t megabits_per_s = 0;          // reported by its driver; 0: unknown
  std::vector<std::string> addresses;  // with prefix length, "10.0.0.1/24", "fe80::1/64"
  std::string pci;                     // "0000:1b:00.0"; empty if it is not a PCI device
  bool operator==(const NetInterface&) const = default;
};

struct Host {
  Machine machine;
  bool cuda = false;  // whether ranks of this program can compute on its GPUs
  // CUDA_VISIBLE_DEVICES on that host; nullopt if it is unset or the build has no CUDA.
  std::optional<std::string> visible_devices = std::nullopt;
  std::vector<NetInterface> interfaces = {};  // by name
  bool operator==(const Host&) const = default;
};

// Describes this process's host. `cuda` is true if the build has CUDA and the driver lets this process open its
// devices; CUDA itself is not initialized. `respect_affinity` is as in Machine::this_machine. Raises
// Error(kUnavailable) if the machine cannot be read.
Host this_host(bool respect_affinity = true);

// Returns the interfaces of this host by name, with IPv4 and IPv6 addresses. Raises Error(kUnavailable).
std::vector<NetInterface> network_interfaces();

}  // namespace annulus
