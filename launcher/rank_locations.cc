// See rank_locations.h.
#include "launcher/rank_locations.h"

#include <algorithm>
#include <optional>

#include "common/text.h"
#include "launcher/launch/rank_place.h"
#include "launcher/network/nccl_log.h"
#include "launcher/threads.h"

namespace annulus {
namespace {

constexpr size_t kHosts = 16;  // at most this many hosts get a line of their own

std::string range(size_t begin, size_t end) {
  return std::to_string(begin) + (end - begin > 1 ? "-" + std::to_string(end - 1) : "");
}

std::string ranks_text(size_t begin, size_t end) { return (end - begin > 1 ? "ranks " : "rank ") + range(begin, end); }

// "a b c", or only "a" if all values are the same. `values` is not empty.
std::string list(const std::vector<std::string>& values) {
  if (std::equal(values.begin() + 1, values.end(), values.begin())) return values.front();
  return join(values, " ");
}

// The network settings that this rank has given to NCCL and MPI.
struct JobNetwork {
  Network network;
  Applied applied;
  std::string hca;       // the HCA of the rank's place
  bool known = false;    // whether that place is known
  bool changed = false;  // whether it changed after MPI started
  bool other_hosts = false;
  std::vector<std::string> lines;
};
std::optional<JobNetwork> job_network;

struct Known {
  bool place = false;
  bool gpu = false;
  std::string hca;
};

Known known_of(const RankPlace& place, int local_rank) {
  const auto index = static_cast<size_t>(local_rank);
  if (index >= place.ranks().size()) return {};
  const RankPlacement& own = place.ranks()[index];
  return {true, own.gpu >= 0, own.hca};
}

std::vector<std::string> lines_of(const JobNetwork& now) {
  std::vector<std::string> lines = now.applied.lines;
  const bool nearest = now.network.nearest_hca;
  if (nearest && !now.known) {
    lines.push_back(
        "the nearest HCA was requested, but the launcher does not say how many ranks share this host, so the place "
        "of each rank is unknown; NCCL and MPI choose");
  } else if (nearest && now.hca.empty()) {
    lines.push_back("the nearest HCA was requested, but none is known on this host; NCCL and MPI choose");
  } else if (nearest && now.changed) {
    lines.push_back("NCCL uses each rank's nearest HCA, which was not known when MPI started; MPI does not");
  } else if (!now.hca.empty()) {
    lines.push_back(nearest ? "each rank uses its nearest HCA"
                            : "NCCL and MPI choose the HCA of each rank, which may not be its nearest "
                              "(network.rank_hca)");
  }
  for (std::string& line : lines) line = "  network: " + line;
  return lines;
}

}  // namespace

void set_job_network(const Network& network, const LaunchInfo& info, const RankPlace& place) {
  const Known known = known_of(place, info.local_rank);
  job_network.emplace();
  job_network->network = network;
  job_network->applied = apply_network(network_variables(network, known.hca));
  job_network->hca = known.hca;
  job_network->known = known.place;
  job_network->other_hosts = info.size > info.local_size;
  if (job_network->other_hosts && known.gpu) record_nccl_log();
  job_network->lines = lines_of(*job_network);
}

void update_job_network(int local_rank, bool gpu, const RankPlace& place) {
  if (!job_network) return;
  const Known known = known_of(place, local_rank);
  if (job_network->other_hosts && gpu) record_nccl_log();
  if (known.place == job_network->known && known.hca == job_network->hca) return;
  job_network->known = known.place;
  job_network->hca = known.hca;
  job_network->changed = true;
  apply_for_nccl(network_variables(job_network->network, known.hca), job_network->applied);
  job_network->lines = lines_of(*job_network);
}

void bind_to_device(const Job& job, bool gpu) {
  // If ranks of one machine report different host names, the launcher's count of local ranks and the job's differ. Such
  // ranks keep the place that the launcher's count gave them.
  if (static_cast<int>(rank_place().ranks().size()) != job.local_size) return;
  if (const std::optional<int> threads = rank_place().carry_out(job.local_rank, gpu)) set_threads(threads);
  if (job_network) job_network->other_hosts = job.size > job.local_size;
  update_job_network(job.local_rank, gpu);
}

const std::vector<std::string>& network_lines() {
  static const std::vector<std::string> none;
  return job_network ? job_network->lines : none;
}

std::vector<RankLocation> gather_rank_locations(Job& job, bool gpu) {
  RankLocation own{job.host, "cpu", "", gpu ? nccl_devices() : "", job.launch.rank};
  const std::vector<RankPlacement>& placed = rank_place().ranks();
  if (static_cast<int>(placed.size()) == job.local_size) {
    const RankPlacement& rank = placed[job.local_rank];
    if (gpu && !rank.gpu_pci.empty()) own.device = rank.gpu_pci;
    own.nic = rank.hca.empty() ? rank.nic_name : rank.hca;
  }
  std::vector<RankLocation> locations;
  const std::string text = words_to_line({own.host, own.device, own.nic, own.nccl, std::to_string(own.launch_rank)});
  for (const std::string& line : all_gather_text(*job.world, text, {"where the ranks are", 0})) {
    const std::vector<std::string> parts = words_of_line(line);
    locations.push_back({parts.at(0), parts.at(1), parts.at(2), parts.at(3), std::stoi(parts.at(4))});
  }
  return locations;
}

std::vector<std::string> ring_lines(const std::vector<RankLocation>& locations, int context) {
  const size_t ranks = locations.size();
  const auto length = static_cast<size_t>(context);
  std::vector<std::string> lines;
  if (length > 1) {
    std::string line = ranks == length ? "ring: ranks " : "rings: ranks ";
    for (size_t begin = 0; begin < ranks; begin += length) {
      if (begin == 8 * length) {
        line += ", ...";
        break;
      }
      line += (begin == 0 ? "" : ", ") + range(begin, begin + length);
    }
    lines.push_back(line + ", each to the next and the last to the first");
  }
  size_t hosts = 0;
  for (size_t begin = 0, end = 0; begin < ranks; begin = end) {
    std::vector<std::string> devices, nics, nccl;
    for (end = begin; end < ranks && locations[end].host == locations[begin].host; ++end) {
      devices.push_back(locations[end].device);
      nics.push_back(locations[end].nic.empty() ? "none" : locations[end].nic);
      nccl.push_back(locations[end].nccl.empty() ? "?" : locations[end].nccl);
    }
    if (++hosts > kHosts) continue;
    lines.push_back("  host " + locations[begin].host + ": " + ranks_text(begin, end) + " on " + list(devices) +
                    ", nearest NIC " + list(nics));
    const std::string took = list(nccl);
    if (took.find_first_not_of("? ") != std::string::npos) lines.back() += ", NCCL took " + took;
  }
  if (hosts > kHosts) lines.push_back("  and " + std::to_string(hosts - kHosts) + " more hosts");
  std::string numbers;
  bool renumbered = false;
  for (size_t r = 0; r < ranks; ++r) {
    renumbered = renumbered || locations[r].launch_rank != static_cast<int>(r);
    if (r < 64) numbers += " " + std::to_string(locations[r].launch_rank);
  }
  if (renumbered) {
    lines.push_back("  ranks are numbered host by host; the launcher numbers them" + numbers +
                    (ranks > 64 ? " ..." : ""));
  }
  return lines;
}

}  // namespace annulus
