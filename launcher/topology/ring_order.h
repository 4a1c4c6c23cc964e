// Chooses the order of one host's GPUs in the job's rings so that the links between neighbours are fast. placement.cc
// uses it.
//
// Thread safety: no state.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus {

// How good an order is, compared member by member: first its slowest link, because that link sets the pace of the
// rings, then the sum of all links, then how near to the network those GPUs are from which a ring continues on another
// host.
struct RingWorth {
  int64_t slowest = 0;
  int64_t sum = 0;
  int64_t ends = 0;
  auto operator<=>(const RingWorth&) const = default;
};

// The part of a ring that lies on this host: `members` consecutive GPUs. If `closed`, it is a whole ring, whose last
// GPU sends to its first; otherwise the ring continues on another host.
struct RingPiece {
  int members = 0;
  bool closed = true;
  bool operator==(const RingPiece&) const = default;
};
using RingPieces = std::vector<RingPiece>;

// bandwidth[i][j] is symmetric and >= 0. nearness[i] says how near GPU i is to the network, from 0 to 7; the vector is
// empty where all GPUs are equally near.
struct GpuGraph {
  std::vector<std::vector<int64_t>> bandwidth;
  std::vector<int> nearness = {};
};
// The pieces take their members from `order` one piece after the other; no link joins two pieces. Example: the order
// {0, 2, 1, 3} with two closed pieces of 2 members has the links 0-2 and 1-3, each counted in both directions. An order
// without any link is worth {0, 0, ends}.
RingWorth ring_worth(const GpuGraph& gpus, const std::vector<int>& order, const RingPieces& pieces);

// Returns an order of `members` (indices into `gpus`, as many as the pieces have members) of greatest worth; a single
// closed piece begins with the first member. The result is exact (Held-Karp) for up to 9 members, and of several equal
// orders the one nearest to `members`; for more members it is greedy, and improved by 2-opt for up to 32. It takes
// 2^9 * 9^3 steps or about members^3.
std::vector<int> best_ring_order(const GpuGraph& gpus, const std::vector<int>& members, const RingPieces& pieces);

// Chooses as many indices of `gpus` as the pieces have members, such that their best order is worth the most. They are
// ascending, and the lowest where several choices are equal. Up to 9 GPUs all subsets are compared; for more, subsets
// are grown greedily.
std::vector<int> best_members(const GpuGraph& gpus, const RingPieces& pieces);

}  // namespace annulus
