// Reductions in the order of the ranks, for backends that add on the CPU: equal inputs give equal bits, whatever
// carried them. And how much of a reduce_scatter ranks that send messages hold at a time; memory plans ask for that,
// too.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace annulus {

// What Communicator::reduce_scatter_holds says between ranks of MPI: for the plan of a world that is not here.
int64_t mpi_reduce_scatter_holds(int ranks, int64_t payload);

namespace comm_internal {

// out[i] = from[0][i] (op) from[1][i] ..., from left to right: bf16 in fp32, rounded once, all else in its own dtype.
// fp32, fp64, bf16 or int64. `out` may be one of `from`.
void reduce_in_rank_order(c10::ScalarType dtype, ReduceOp op, void* out, const std::vector<const void*>& from,
                          int64_t count);

// A reduce_scatter between ranks that send messages goes in rounds, of which this many are under way at a time...
constexpr int64_t kRoundsAtOnce = 2;
// ... and in each of which a rank receives so many bytes of its piece from every other, more only if an element has
// more: small enough for progress() to add a round in passing, large enough for few messages.
int64_t round_bytes(int ranks, int64_t piece);

}  // namespace comm_internal
}  // namespace annulus
