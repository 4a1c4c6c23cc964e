// Reductions in the order of the ranks, for backends that add on the CPU: equal inputs give equal bits, whichever
// backend carried them. Also computes how much memory a reduce_scatter takes between ranks that send messages. Used by
// comm/threads, comm/mpi and comm/c10d, and by the memory plan of a training step (runtime/training/state/sharding.cc).
//
// Thread safety: functions without state.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "comm/hosts.h"

namespace annulus {

// The bytes that Communicator::reduce_scatter_holds returns on `rank` between ranks that send messages. The memory plan
// uses it for jobs that are not running. groups: RankHosts::groups() of those ranks.
int64_t messages_hold(const RankGroups& groups, int rank, int64_t payload);

namespace comm_internal {

// out[i] = from[0][i] (op) from[1][i] ..., from left to right, for `count` elements. dtype: fp32, fp64, int64, or bf16,
// which is computed in fp32 and rounded once. `out` may be one of `from`. With several groups, each group of `from` is
// reduced by itself, and then the results in the order of the groups: groups of 2 and 2 give (a + b) + (c + d).
void reduce_in_rank_order(c10::ScalarType dtype, ReduceOp op, void* out, const std::vector<const void*>& from,
                          int64_t count, const RankGroups& groups);

// The same in two steps: inputs of dtype `values` are reduced to partial sums of dtype `sums`, and these are reduced to
// a result of dtype `values`. For bf16 the sums are fp32, so that only the result is rounded.
struct SumTypes {
  c10::ScalarType values, sums;
  explicit SumTypes(c10::ScalarType dtype)
      : values(dtype), sums(dtype == c10::ScalarType::BFloat16 ? c10::ScalarType::Float : dtype) {}
};
void reduce_to_sums(SumTypes types, ReduceOp op, void* sums, const std::vector<const void*>& values, int64_t count);
void reduce_sums(SumTypes types, ReduceOp op, void* values, const std::vector<const void*>& sums, int64_t count);

// A reduction between ranks that send messages goes in rounds. This many are under way at a time.
constexpr int64_t kRoundsAtOnce = 2;
// The bytes of every rank's piece that a round reduces (or one element, if that has more). A round is small enough for
// progress() to add it without delaying its caller, and large enough to keep messages few. piece: the bytes of the
// longest piece.
int64_t round_bytes(const RankGroups& groups, int64_t piece);
// The memory that `rank` needs for a round, in parts of round_bytes(). A part of sums counts as much as one of values.
int64_t held_parts(const RankGroups& groups, int rank);

}  // namespace comm_internal
}  // namespace annulus
