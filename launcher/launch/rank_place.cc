// See rank_place.h.
#include "launcher/launch/rank_place.h"

#include <algorithm>
#include <utility>

#include "comm/bootstrap/launch_info.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "launcher/topology/binding.h"
#include "memory/numa.h"
#include "memory/pool/pool.h"

namespace annulus {
namespace {

// "cpus 0 / 1", or for more than 8 ranks the number of cores of each: "4 cores each", "2 to 3 cores each".
std::string describe(const std::vector<RankPlacement>& ranks) {
  constexpr size_t kFew = 8;
  if (ranks.size() > kFew) {
    const bool shared =
        std::any_of(ranks.begin(), ranks.end(), [](const RankPlacement& rank) { return rank.oversubscribed; });
    const auto [least, most] = std::minmax_element(
        ranks.begin(), ranks.end(), [](const RankPlacement& a, const RankPlacement& b) { return a.cores < b.cores; });
    return (least->cores < most->cores ? std::to_string(least->cores) + " to " : "") + counted(most->cores, "core") +
           " each" + (shared ? ", shared" : "");
  }
  std::string text = "cpus ";
  for (const RankPlacement& rank : ranks) {
    if (&rank != &ranks.front()) text += " / ";
    text += rank.cpus.to_string();
  }
  return text;
}

bool may_bind() { return switch_from_environment("ANNULUS_BIND", true); }

}  // namespace

void HostAccess::bind_process(const RankPlacement& rank) {
  Pool& pool = Pool::process();
  try {
    bind_to_cpus(rank);
    const std::string warning = bind_memory(rank.memory_nodes);
    if (!warning.empty() && rank.local_rank == 0) log_warn("place", warning);
    if (warning.empty()) pool.set_nodes(rank.memory_nodes);
  } catch (const Error& error) {
    // The usual reason, a system that does not allow it, is the same for all ranks of the host.
    if (rank.local_rank == 0) {
      log_warn("place", std::string("this rank is not bound to its processors: ") + error.what());
    }
  }
}

// Binds this process and returns the number of its threads.
int RankPlace::bind(const RankPlacement& own) {
  access_.bind(own);
  bound_ = own;
  text_ = describe(ranks_);
  return own.threads;
}

std::optional<int> RankPlace::take(const LaunchInfo& info, HostRequest request) {
  request.ranks = info.local_size;
  request.job_ranks = std::max(info.size, info.local_size);
  request_ = std::move(request);
  if (info.local_size < 1) return std::nullopt;  // the number of ranks on this host is not known
  // Without `launch`, mpirun may have bound the ranks. A rank's affinity is then its own share and not the processors
  // that all ranks of the host divide, so it is ignored.
  Host host = access_.read(/*respect_affinity=*/info.annulus_size > 0);
  if (!host.machine.is_this_system) return std::nullopt;  // HWLOC_XMLFILE: a description of another machine
  host_ = std::move(host);
  ranks_ = place_on(*host_, request_).placement.ranks;
  if (!may_bind()) return std::nullopt;
  return bind(ranks_.at(info.local_rank));
}

void RankPlace::place_on_gpus(const std::vector<std::string>& pci_bus_ids, int ranks, int job_ranks) {
  const auto usable = [&](const RankPlacement& rank) {
    return std::find(pci_bus_ids.begin(), pci_bus_ids.end(), rank.gpu_pci) != pci_bus_ids.end();
  };
  if (static_cast<int>(ranks_.size()) == ranks && std::all_of(ranks_.begin(), ranks_.end(), usable)) return;
  if (!host_) host_ = access_.read(/*respect_affinity=*/false);
  Host host = *host_;
  // The GPUs that CUDA reports replace those that were derived from CUDA_VISIBLE_DEVICES.
  host.visible_devices.reset();
  host.cuda = true;
  host.machine.set_visible_gpus(pci_bus_ids);
  HostRequest request = request_;
  request.ranks = ranks;
  request.job_ranks = job_ranks;
  request.device = "cuda";
  ranks_ = place_on(host, request).placement.ranks;
}

std::optional<int> RankPlace::carry_out(int local_rank, bool gpu) {
  if (ranks_.empty()) return std::nullopt;
  if (!gpu && ranks_.front().device != DeviceKind::kCpu) {
    HostRequest request = request_;
    request.ranks = static_cast<int>(ranks_.size());
    request.device = "cpu";
    ranks_ = place_on(*host_, request).placement.ranks;
  }
  const RankPlacement& own = ranks_.at(local_rank);
  if (!bound_) return std::nullopt;
  text_ = describe(ranks_);  // even if this rank keeps its place, others may have moved
  if (bound_->cpus == own.cpus && bound_->memory_nodes == own.memory_nodes) return std::nullopt;
  return bind(own);
}

RankPlace& rank_place() {
  static RankPlace place;
  return place;
}

}  // namespace annulus
