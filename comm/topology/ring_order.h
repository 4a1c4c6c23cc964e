// The order in which the GPUs of one host stand in a ring, so that neighbours are close. Used by placement.cc.
//
// Thread safety: no state.
#pragma once

#include <cstdint>
#include <vector>

namespace annulus {

// What an order is worth: its slowest link first, for it paces the ring, then the sum of all.
struct RingWorth {
  int64_t slowest = 0;
  int64_t sum = 0;
  auto operator<=>(const RingWorth&) const = default;
};

// bandwidth[i][j], symmetric, >= 0. `closed`: the last is a neighbour of the first (a ring of its own); otherwise the
// order is a path, a piece of a ring that goes on to the next host. Fewer than two members are worth {0, 0}.
RingWorth ring_worth(const std::vector<std::vector<int64_t>>& bandwidth, const std::vector<int>& order, bool closed);

// An order of `members` (indices into bandwidth) of greatest worth; a closed one begins with the first member. Exact
// (Held-Karp) for up to 9 members, the order nearest to `members` where several are equal; greedy for more, improved by
// 2-opt for up to 32. Time: 2^9 * 81 steps, or about members^3.
std::vector<int> best_ring_order(const std::vector<std::vector<int64_t>>& bandwidth, const std::vector<int>& members,
                                 bool closed);

// `count` of the indices of `bandwidth`, ascending, whose best order is worth the most: all subsets for up to 9, greedy
// growth for more; the lowest indices where several are equal.
std::vector<int> best_members(const std::vector<std::vector<int64_t>>& bandwidth, int count, bool closed);

}  // namespace annulus
