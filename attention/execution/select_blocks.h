// Content-adaptive block maps: the selection from q and k, the only planning that a step must wait for. Used by
// attention_forward, once a call; the backward uses the map that the forward used.
//
// For each batch row, query head and query block: the `keep` key blocks with the largest q_mean . k_mean (docs/
// attention.md), the block's own one always among them, ties to the lower block; where causal, from no later block than
// its own. Means are over real tokens; block sums are fp64, each rank's in position order, then added over the ranks.
// Scores that are equal but for rounding may therefore be ranked otherwise at another number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// The request with every adaptive map of its pattern (also in members of a union) replaced by the map selected from the
// ranks' q [B, n, H, D] and k [B, m, Hk, D], which fit the request: attention_forward lets the ranks agree on that
// before. All ranks get the same. Collective where the request has more than one rank. Takes memory for block sums
// (fp64, 1 / block of q and k), the selection, and a few times 8 MB on a CPU, 64 MB on a GPU (more only where one
// period of blocks or the scores of one query block are more) for rows on their way to sums and for scores.
//
// On a GPU nearly all is done there, with launches that do not grow with heads and only grow with blocks by that
// memory. For each map the host waits once for the selection, which planning needs, so a call cannot be recorded in a
// CUDA graph; once more for that of all ranks; and once for the means where fast products leave a choice open (scores
// equal but for rounding), which is then made on the CPU.
PlanRequest select_blocks(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, Communicator& comm,
                          const std::string& label);

// The most that this takes at once on a rank: bytes, 0 where nothing is selected. Calls of select_blocks with tensors
// of `head_dim` elements a row.
int64_t selection_bytes(const PlanRequest& request, int rank, int64_t head_dim, bool gpu);

}  // namespace annulus
