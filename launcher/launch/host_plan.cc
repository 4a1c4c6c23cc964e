// See host_plan.h.
#include "launcher/launch/host_plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "memory/numa.h"
#include "topology/binding.h"
#include "topology/report.h"

namespace annulus {
namespace {

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
std::vector<RankPlacement> ranks_here;
int ring_length = 0;
std::vector<std::string> job_hcas;

}  // namespace

const std::string& placement_text() { return bound_to; }
const std::vector<RankPlacement>& placed_ranks() { return ranks_here; }

Host this_host(int ranks, bool respect_affinity) {
  Host host{Machine::this_machine(respect_affinity)};
#ifdef ANNULUS_CUDA
  if (access("/dev/nvidiactl", R_OK | W_OK) != 0) return host;
  if (const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES")) host.machine.hide_gpus_from_cuda(visible);
  if (static_cast<int>(host.machine.gpus.size()) >= ranks) host.device = DeviceKind::kCuda;
#else
  (void)ranks;
#endif
  return host;
}

HostPlan plan_host(int ranks, int context, const std::vector<std::string>& hcas) {
  Host host = this_host(ranks);
  if (!hcas.empty()) host.machine.keep_hcas(hcas);
  const Placement placement =
      place({host.machine}, std::vector<int>{ranks}, {.device = host.device, .context = context});
  HostPlan plan;
  plan.table = topology_table({host.machine}, placement);
  plan.cores = static_cast<int>(host.machine.cores.size());
  plan.oversubscribed = placement.oversubscribed;
  return plan;
}

std::optional<int> bind_rank(const LaunchInfo& info, int context, const std::vector<std::string>& hcas) {
  ring_length = context;
  job_hcas = hcas;
  const char* const wanted = std::getenv("ANNULUS_BIND");
  if (wanted != nullptr && std::string_view(wanted) == "0") return std::nullopt;
  if (info.local_size < 1) return std::nullopt;  // nobody says how many ranks share this host
  // mpirun by itself binds ranks: then a rank's affinity is its own share, not what all ranks divide among them.
  const bool respect_affinity = info.annulus_size > 0;
  Host host = this_host(info.local_size, respect_affinity);
  if (!host.machine.is_this_system) return std::nullopt;  // HWLOC_XMLFILE: a description of another machine
  if (!hcas.empty()) host.machine.keep_hcas(hcas);
  const Placement placement =
      place({host.machine}, std::vector<int>{info.local_size},
            {.device = host.device, .context = context, .job_ranks = std::max(info.size, info.local_size)});
  bound_to = describe(placement);
  ranks_here = placement.ranks;
  const RankPlacement& own = ranks_here.at(static_cast<size_t>(info.local_rank));
  // A rank that cannot be bound is slower, not wrong.
  try {
    bind_to_cpus(own);
    const std::string warning = bind_memory(own.memory_nodes);
    if (!warning.empty() && info.local_rank == 0) std::fprintf(stderr, "annulus: %s\n", warning.c_str());
  } catch (const Error& error) {
    std::fprintf(stderr, "annulus: not bound to its processors: %s\n", error.what());
  }
  return own.threads;
}

void place_on_gpus(const std::vector<std::string>& pci_bus_ids, int ranks, int job_ranks) {
  const auto usable = [&](const RankPlacement& rank) {
    return std::find(pci_bus_ids.begin(), pci_bus_ids.end(), rank.gpu_pci) != pci_bus_ids.end();
  };
  if (static_cast<int>(ranks_here.size()) == ranks && std::all_of(ranks_here.begin(), ranks_here.end(), usable)) return;
  Machine machine = Machine::this_machine(/*respect_affinity=*/false);
  machine.set_visible_gpus(pci_bus_ids);
  if (!job_hcas.empty()) machine.keep_hcas(job_hcas);
  ranks_here = place({machine}, std::vector<int>{ranks},
                     {.device = DeviceKind::kCuda, .context = ring_length, .job_ranks = job_ranks})
                   .ranks;
}

}  // namespace annulus
