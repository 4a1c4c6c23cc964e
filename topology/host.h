// Host: a machine as a job sees it: what it is made of, whether ranks can compute on its GPUs, and its network
// interfaces. Placement, `topology`, `doctor` and `launch` start from it; cluster.h keeps several in a file.
//
// Thread safety: plain data and functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "topology/machine.h"

namespace annulus {

// An IP interface.
struct NetInterface {
  std::string name;  // "eth0"
  bool up = false;
  bool loopback = false;
  int64_t megabits_per_s = 0;          // as its driver states it; 0: unknown
  std::vector<std::string> addresses;  // with the length of the network's prefix, "10.0.0.1/24", "fe80::1/64"
  std::string pci;                     // "0000:1b:00.0"; empty where it is no PCI device
  bool operator==(const NetInterface&) const = default;
};

struct Host {
  Machine machine;
  bool cuda = false;  // ranks of this program can compute on its GPUs
  // What CUDA_VISIBLE_DEVICES says there; nothing: it is not set.
  std::optional<std::string> visible_devices = std::nullopt;
  std::vector<NetInterface> interfaces = {};  // by name
  bool operator==(const Host&) const = default;
};

// The one that this process runs on, with its GPUs where the build has CUDA and the driver lets this process in. Starts
// nothing of CUDA. `respect_affinity` as Machine::this_machine. Raises Error(kUnavailable) when the machine cannot be
// read.
Host this_host(bool respect_affinity = true);

// Those of this host, by name; addresses of both families. Raises Error(kUnavailable).
std::vector<NetInterface> network_interfaces();

}  // namespace annulus
