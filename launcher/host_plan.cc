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

// Ranks get GPUs when this build and this host have them, one for each rank: as device = "auto" decides.
DeviceKind likely_device(const Machine& machine, int ranks) {
#ifdef ANNULUS_CUDA
  const bool driver = access("/dev/nvidiactl", R_OK | W_OK) == 0;
  if (driver && static_cast<int>(machine.gpus.size()) >= ranks) return DeviceKind::kCuda;
#else
  (void)machine;
  (void)ranks;
#endif
  return DeviceKind::kCpu;
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

}  // namespace

const std::string& placement_text() { return bound_to; }

HostPlan plan_host(int ranks) {
  const std::vector<Machine> hosts = {Machine::this_machine()};
  const Placement placement = place(hosts, std::vector<int>{ranks}, {likely_device(hosts.front(), ranks)});
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
  const std::vector<Machine> hosts = {Machine::this_machine(respect_affinity)};
  if (!hosts.front().is_this_system) return std::nullopt;  // HWLOC_XMLFILE: a description of another machine
  const Placement placement =
      place(hosts, std::vector<int>{info.local_size}, {likely_device(hosts.front(), info.local_size)});
  bound_to = describe(placement);
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
