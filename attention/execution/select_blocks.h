// Selects content-adaptive block maps from q and k. A step must always wait for this part of planning. Used by
// attention_forward, once for each call, by generation (runtime/inference/generator.h) and by torch.ops.annulus; the
// backward uses the map of its forward. selection_bytes is for memory plans.
//
// For each batch row, query head and query block it selects the `keep` key blocks with the largest q_mean . k_mean
// (docs/explanation/attention.md). The block's own key block is always selected, ties go to the lower block, and a
// causal map selects no block after the own one. Means are over the tokens that a block really has. Block sums are
// fp64; each rank sums in position order, and then the ranks' sums are added. Scores that differ only by rounding may
// therefore be ranked differently at another number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// Returns the request with every adaptive map of its pattern (also in members of a union) replaced by the map selected
// from the ranks' q [B, n, H, D] and k [B, m, Hk, D]. These must fit the request; attention_forward makes the ranks
// agree on that beforehand. All ranks get the same map. Collective if the request has more than one rank. It takes
// memory for block sums (fp64, 1 / block of q and k), for the selection, and for rows and scores a few times 8 MB on a
// CPU or 64 MB on a GPU (more only if one period of blocks or the scores of one query block need more).
//
// On a GPU nearly all of the work is done on the device. The number of launches does
// not depend on the number of heads, and grows with the number of blocks only as far as the memory above requires. For
// each map the host waits for the rank's selection, which planning needs; with several ranks, for that of all ranks;
// and for the means if the scores of some blocks differ only by rounding, which are then compared on the CPU. So a call
// cannot be recorded in a CUDA graph.
PlanRequest select_blocks(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, Communicator& comm,
                          const std::string& label);

// The most bytes that a call of select_blocks takes at once on a rank, for tensors with `head_dim` elements in a row; 0
// if nothing is selected.
int64_t selection_bytes(const PlanRequest& request, int rank, int64_t head_dim, bool gpu);

}  // namespace annulus
