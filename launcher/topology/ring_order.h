// Orders one host's GPUs in the job's rings so that links between successive ranks are fast. Used by placement.cc.
//
// Thread safety: functions without state.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus {

// The quality of an order, compared lexicographically: its slowest link, which limits the rings, then the sum of all
// links, then the nearness to the network of the GPUs from which a ring continues on another host.
struct RingWorth {
  int64_t slowest = 0;
  int64_t sum = 0;
  int64_t ends = 0;
  auto operator<=>(const RingWorth&) const = default;
};

// The part of a ring on this host: `members` consecutive GPUs. If `closed`, it is a whole ring, whose last GPU sends to
// its first; otherwise the ring continues on another host.
struct RingPiece {
  int members = 0;
  bool closed = true;
  bool operator==(const RingPiece&) const = default;
};
using RingPieces = std::vector<RingPiece>;

// bandwidth[i][j] is symmetric and >= 0. nearness[i] is the nearness of GPU i to the network, from 0 to 7; empty: all
// are equally near.
struct GpuGraph {
  std::vector<std::vector<int64_t>> bandwidth;
  std::vector<int> nearness = {};
};
// Returns the quality of `order`, whose consecutive parts are the pieces; no link joins two pieces. Example: {0, 2, 1,
// 3} with two closed pieces of 2 members has the links 0-2 and 1-3, each counted in both directions. Without any link,
// slowest and sum are 0.
RingWorth ring_worth(const GpuGraph& gpus, const std::vector<int>& order, const RingPieces& pieces);

// Returns the best order of `members` (indices into `gpus`, as many as the pieces have members); a single closed piece
// begins with the first member. Compares all orders of up to 9 members, with ties to the one nearest to `members`;
// greedy for more, with 2-opt for up to 32.
std::vector<int> best_ring_order(const GpuGraph& gpus, const std::vector<int>& members, const RingPieces& pieces);

// Returns the ascending indices of the `gpus` with the best order, as many as the pieces have members, with ties to the
// lowest. Compares all subsets of up to 9 GPUs; for more, grows subsets greedily.
std::vector<int> best_members(const GpuGraph& gpus, const RingPieces& pieces);

}  // namespace annulus
