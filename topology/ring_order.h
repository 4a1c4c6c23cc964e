// The order in which the GPUs of one host stand in rings, so that neighbours are close. Used by placement.cc.
//
// Thread safety: no state.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus {

// What an order is worth: its slowest link first, for it paces the rings, then the sum of all, then how near to the
// network those members are from which a ring goes on to another host.
struct RingWorth {
  int64_t slowest = 0;
  int64_t sum = 0;
  int64_t ends = 0;
  auto operator<=>(const RingWorth&) const = default;
};

// What part of a ring lies on this host: so many members in a row. `closed`: it is a whole ring, the last is a
// neighbour of the first; otherwise the ring goes on to another host.
struct RingPiece {
  int members = 0;
  bool closed = true;
  bool operator==(const RingPiece&) const = default;
};
using RingPieces = std::vector<RingPiece>;

// bandwidth[i][j], symmetric, >= 0; nearness[i] to the network, from 0 to 7, empty where all are alike. An order is cut
// into the pieces one after the other; no link joins two pieces. Orders without any link are worth {0, 0, ends}.
struct GpuGraph {
  std::vector<std::vector<int64_t>> bandwidth;
  std::vector<int> nearness = {};
};
RingWorth ring_worth(const GpuGraph& gpus, const std::vector<int>& order, const RingPieces& pieces);

// An order of `members` (indices into `gpus`, as many as the pieces have) of greatest worth; a single closed piece
// begins with the first member. Exact (Held-Karp) for up to 9 members, the order nearest to `members` where several are
// equal; greedy for more, improved by 2-opt for up to 32. Time: 2^9 * 9^3 steps, or about members^3.
std::vector<int> best_ring_order(const GpuGraph& gpus, const std::vector<int>& members, const RingPieces& pieces);

// As many of the indices of `gpus` as the pieces have members, ascending, whose best order is worth the most: all
// subsets for up to 9, greedy growth for more; the lowest indices where several are equal.
std::vector<int> best_members(const GpuGraph& gpus, const RingPieces& pieces);

}  // namespace annulus
