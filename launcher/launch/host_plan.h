// Where the ranks of a job go on this host, for launch, for `topology` and for the ranks themselves: topology's
// placement, and what follows from it for threads and devices.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/launch_info.h"
#include "topology/machine.h"
#include "topology/placement.h"

namespace annulus {

// What this host's ranks are placed on: the machine, with the GPUs that they may use, and the kind of device that they
// get by device = "auto" if there are `ranks` of them. Starts nothing of CUDA. Raises Error(kUnavailable) when the
// machine cannot be read.
struct Host {
  Machine machine;
  DeviceKind device = DeviceKind::kCpu;
};
Host this_host(int ranks, bool respect_affinity = true);

struct HostPlan {
  std::string table;            // for a person
  int cores = 1;                // usable cores of this host
  bool oversubscribed = false;  // more ranks than cores: ranks share them
};

// For `ranks` ranks on this host, in rings of `context` (PlacementOptions), of a job with these HCAs (all where it
// names none).
HostPlan plan_host(int ranks, int context, const std::vector<std::string>& hcas);

// Binds the calling process to its cores and memory and returns how many threads suit it; nothing when it leaves
// binding as it is: ANNULUS_BIND=0, or nobody says how many ranks share the host. Otherwise as
// plan_host. Call before any thread starts.
std::optional<int> bind_rank(const LaunchInfo& info, int context, const std::vector<std::string>& hcas);

// Where bind_rank put the ranks of this host, by local rank; empty when it did nothing.
const std::vector<RankPlacement>& placed_ranks();

// Places the ranks of this host on GPUs that CUDA lets this process use, by their PCI bus ids, where bind_rank has not
// or has placed one on another: afterwards placed_ranks() has `ranks` ranks of a job of `job_ranks`. Binds nothing.
void place_on_gpus(const std::vector<std::string>& pci_bus_ids, int ranks, int job_ranks);

// What bind_rank did, for one line of output: "cpus 0 / 1" by local rank; empty when it did nothing.
const std::string& placement_text();

}  // namespace annulus
