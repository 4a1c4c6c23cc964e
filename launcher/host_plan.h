// Where the ranks of a launch go on this host, for launch and for the ranks themselves: comm/topology's placement, and
// what follows from it for threads.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/launch_info.h"

namespace annulus {

struct HostPlan {
  std::string table;            // for a person
  int cores = 1;                // usable cores of this host
  bool oversubscribed = false;  // more ranks than cores: ranks share them
};

// For `ranks` ranks on this host. Raises Error(kUnavailable) when the machine cannot be read.
HostPlan plan_host(int ranks);

// Binds the calling process to its cores and memory and returns how many threads suit it; nothing when it leaves
// binding as it is: ANNULUS_BIND=0, or nobody says how many ranks share the host. Call before any thread starts.
std::optional<int> bind_rank(const LaunchInfo& info);

// What bind_rank did, for one line of output: "cpus 0 / 1" by local rank; empty when it did nothing.
const std::string& placement_text();

// The PCI bus ids of the GPUs beside whose cores bind_rank put the ranks of this host, by local rank; empty when it
// placed them without GPUs or did nothing. Whether CUDA lets this process use them is for choose_device to find out.
const std::vector<std::string>& placed_gpus();

}  // namespace annulus
