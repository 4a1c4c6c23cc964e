// Merges what the ranks of a communicator have computed for the same queries, each over keys of its own: where keys
// stay and queries come to them. Generation uses it for each new token (runtime/inference/kv_cache.h).
//
// docs/explanation/attention.md, "Merging partial results", has the formulas.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace annulus {

// The attention of some queries over some keys, in the accumulator's dtype.
struct PartialAttention {
  at::Tensor out;  // [B, n, H, D]
  at::Tensor lse;  // [B, H, n]; -inf: no key, out is ignored
};

// Returns the attention of the queries over the keys of all ranks. Collective: one all_gather of out and lse, of the
// same shapes and dtype on all ranks. Every rank adds in the order of the ranks and so gets the same bits. Raises what
// all_gather raises.
PartialAttention merge_over_ranks(Communicator& comm, const PartialAttention& own, OpLabel label);

}  // namespace annulus
