// See seats.h.
#include "launcher/seats.h"

#include <algorithm>

#include "launcher/launch/host_plan.h"
#include "launcher/network/nccl_words.h"

namespace annulus {
namespace {

constexpr size_t kHosts = 16;  // with a line of their own
constexpr char kBetween = '\x1f';

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == kBetween) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string range(size_t begin, size_t end) {
  return std::to_string(begin) + (end - begin > 1 ? "-" + std::to_string(end - 1) : "");
}

std::string ranks_text(size_t begin, size_t end) { return (end - begin > 1 ? "ranks " : "rank ") + range(begin, end); }

// "a", or "a b c"; what is the same for all is said once.
std::string list(const std::vector<std::string>& values) {
  if (std::equal(values.begin() + 1, values.end(), values.begin())) return values.front();
  std::string out;
  for (const std::string& value : values) out += (out.empty() ? "" : " ") + value;
  return out;
}

std::vector<std::string> joined_lines;

}  // namespace

void join_network(const Network& network, const LaunchInfo& info) {
  const std::vector<RankPlacement>& placed = placed_ranks();
  const auto index = static_cast<size_t>(info.local_rank);
  if (info.size > info.local_size && index < placed.size() && placed[index].gpu >= 0) ask_nccl_for_words();
  const std::string hca = index < placed.size() ? placed[index].hca : "";
  joined_lines = apply_network(network_variables(network, hca));
  for (std::string& line : joined_lines) line = "  network: " + line;
  if (network.nearest_hca && hca.empty()) {
    joined_lines.push_back(
        "  network: the nearest HCA was asked for, but none is known on this host; NCCL and MPI choose");
  } else if (!hca.empty()) {
    joined_lines.push_back(network.nearest_hca
                               ? "  network: each rank uses its nearest HCA"
                               : "  network: NCCL and MPI choose the HCA of each rank, which may not be "
                                 "its nearest (network.rank_hca)");
  }
}

const std::vector<std::string>& network_lines() { return joined_lines; }

std::vector<Seat> gather_seats(Job& job, bool gpu) {
  Seat own{job.host, "cpu", "", gpu ? nccl_devices() : "", job.launch.rank};
  const std::vector<RankPlacement>& placed = placed_ranks();
  if (static_cast<int>(placed.size()) == job.local_size) {
    const RankPlacement& rank = placed[static_cast<size_t>(job.local_rank)];
    if (gpu && !rank.gpu_pci.empty()) own.device = rank.gpu_pci;
    own.nic = rank.hca.empty() ? rank.nic_name : rank.hca;
  }
  std::vector<Seat> seats;
  const std::string text = own.host + kBetween + own.device + kBetween + own.nic + kBetween + own.nccl + kBetween +
                           std::to_string(own.launch_rank);
  for (const std::string& line : all_gather_text(*job.world, text, {"where the ranks are", 0})) {
    const std::vector<std::string> parts = split(line);
    seats.push_back({parts.at(0), parts.at(1), parts.at(2), parts.at(3), std::stoi(parts.at(4))});
  }
  return seats;
}

std::vector<std::string> ring_lines(const std::vector<Seat>& seats, int context) {
  const size_t ranks = seats.size();
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
    for (end = begin; end < ranks && seats[end].host == seats[begin].host; ++end) {
      devices.push_back(seats[end].device);
      nics.push_back(seats[end].nic.empty() ? "none" : seats[end].nic);
      nccl.push_back(seats[end].nccl.empty() ? "?" : seats[end].nccl);
    }
    if (++hosts > kHosts) continue;
    lines.push_back("  host " + seats[begin].host + ": " + ranks_text(begin, end) + " on " + list(devices) +
                    ", nearest NIC " + list(nics));
    const std::string took = list(nccl);
    if (took.find_first_not_of("? ") != std::string::npos) lines.back() += ", NCCL took " + took;
  }
  if (hosts > kHosts) lines.push_back("  and " + std::to_string(hosts - kHosts) + " more hosts");
  std::string numbers;
  bool renumbered = false;
  for (size_t r = 0; r < ranks; ++r) {
    renumbered = renumbered || seats[r].launch_rank != static_cast<int>(r);
    if (r < 64) numbers += " " + std::to_string(seats[r].launch_rank);
  }
  if (renumbered) {
    lines.push_back("  ranks are numbered host by host; the launcher numbers them" + numbers +
                    (ranks > 64 ? " ..." : ""));
  }
  return lines;
}

}  // namespace annulus
