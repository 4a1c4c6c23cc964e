// Reductions in the order of the ranks, for backends that add on the CPU: equal inputs give equal bits, whatever
// carried them. And how much of a reduce_scatter ranks that send messages hold at a time; memory plans ask for that,
// too.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts.h"

namespace annulus {

// What Communicator::reduce_scatter_holds says between ranks that send messages: for the plan of a world that is not
// here. groups: RankHosts::groups().
int64_t messages_hold(const RankGroups& groups, int rank, int64_t payload);

namespace comm_internal {

// out[i] = from[0][i] (op) from[1][i] ..., from left to right: bf16 in fp32, rounded once, all else in its own dtype.
// fp32, fp64, bf16 or int64. `out` may be one of `from`. Of several groups of `from`, each is reduced by itself, and
// what comes of them in the order of the groups.
void reduce_in_rank_order(c10::ScalarType dtype, ReduceOp op, void* out, const std::vector<const void*>& from,
                          int64_t count, const RankGroups& groups);

// The same in two steps: what has `values` is reduced to what has `sums`, and that again to `values`.
struct SumTypes {
  c10::ScalarType values, sums;
  explicit SumTypes(c10::ScalarType dtype)
      : values(dtype), sums(dtype == c10::ScalarType::BFloat16 ? c10::ScalarType::Float : dtype) {}
};
void reduce_to_sums(SumTypes types, ReduceOp op, void* sums, const std::vector<const void*>& values, int64_t count);
void reduce_sums(SumTypes types, ReduceOp op, void* values, const std::vector<const void*>& sums, int64_t count);

// A reduction between ranks that send messages goes in rounds, of which this many are under way at a time...
constexpr int64_t kRoundsAtOnce = 2;
// ... and each of which reduces so many bytes of every rank's piece, more only if an element has more: small enough for
// progress() to add a round in passing, large enough for few messages. piece: the longest.
int64_t round_bytes(const RankGroups& groups, int64_t piece);
// What `rank` holds of a round, in parts of that length. A part of sums is counted as long as one of values.
int64_t held_parts(const RankGroups& groups, int rank);

}  // namespace comm_internal
}  // namespace annulus
