// See host_plan.h.
#include "launcher/host_plan.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "comm/topology/binding.h"
#include "comm/topology/machine.h"
#include "comm/topology/placement.h"
#include "comm/topology/report.h"
#include "common/error.h"

namespace annulus {
namespace {

// This machine, with the GPUs that ranks get: none unless this build and this host have one for each rank, as
// device = "auto" decides. Starts nothing of CUDA: ranks ask before any thread is there.
std::vector<Machine> this_host(bool respect_affinity, int ranks, PlacementOptions& options) {
  std::vector<Machine> hosts = {Machine::this_machine(respect_affinity)};
  options.device = DeviceKind::kCpu;
#ifdef ANNULUS_CUDA
  if (access("/dev/nvidiactl", R_OK | W_OK) != 0) return hosts;
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES")) hosts.front().hide_gpus_from_cuda(visible);
  if (static_cast<int>(hosts.front().gpus.size()) >= ranks) options.device = DeviceKind::kCuda;
#else
  (void)ranks;
#endif
  return hosts;
}

// "cpus 0 / 1", or of many ranks the number of cores each.
std::string describe(const Placement& placement) {
  constexpr size_t kFew = 8;
  if (placement.ranks.size() > kFew) {
    return std::to_string(placement.ranks.front().threads) + " cores each" +
           (placement.oversubscribed ? ", shared" : "");
  }
  std::string text = "cpus ";
  for (const RankPlacement& rank : placement.ranks) {
    if (&rank != &placement.ranks.front()) text += " / ";
    text += rank.cpus.to_string();
  }
  return text;
}

std::string bound_to;
std::vector<std::string> gpus_of_ranks;

}  // namespace

const std::string& placement_text() { return bound_to; }
const std::vector<std::string>& placed_gpus() { return gpus_of_ranks; }

HostPlan plan_host(int ranks) {
  PlacementOptions options;
  const std::vector<Machine> hosts = this_host(/*respect_affinity=*/true, ranks, options);
  const Placement placement = place(hosts, std::vector<int>{ranks}, options);
  HostPlan plan;
  plan.table = topology_table(hosts, placement);
  plan.cores = static_cast<int>(hosts.front().cores.size());
  plan.oversubscribed = placement.oversubscribed;
  return plan;
}

std::optional<int> bind_rank(const LaunchInfo& info) {
  const char* const wanted = std::getenv("ANNULUS_BIND");
  if (wanted != nullptr && std::string_view(wanted) == "0") return std::nullopt;
  if (info.local_size < 1) return std::nullopt;  // nobody says how many ranks share this host
  // mpirun by itself binds ranks: then a rank's affinity is its own share, not what all ranks divide among them.
  const bool respect_affinity = info.annulus_size > 0;
  PlacementOptions options;
  const std::vector<Machine> hosts = this_host(respect_affinity, info.local_size, options);
  if (!hosts.front().is_this_system) return std::nullopt;  // HWLOC_XMLFILE: a description of another machine
  const Placement placement = place(hosts, std::vector<int>{info.local_size}, options);
  bound_to = describe(placement);
  for (const RankPlacement& rank : placement.ranks) {
    if (!rank.gpu_pci.empty()) gpus_of_ranks.push_back(rank.gpu_pci);
  }
  const RankPlacement& own = placement.ranks.at(static_cast<size_t>(info.local_rank));
  // A rank that cannot be bound is slower, not wrong.
  try {
    for (const std::string& warning : bind_this_process(own).warnings) {
      if (info.local_rank == 0) std::fprintf(stderr, "annulus: %s\n", warning.c_str());
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "annulus: not bound to its processors: %s\n", error.what());
  }
  return own.threads;
}

}  // namespace annulus
