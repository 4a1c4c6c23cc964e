// Content-adaptive block maps: the selection from q and k, the only planning that a step must wait for. Used by
// attention_forward, once a call; the backward uses the map that the forward used.
//
// For each batch row, query head and query block: the `keep` key blocks with the largest q_mean . k_mean (docs/
// attention.md), the block's own one always among them, ties to the lower block; where causal, from no later block than
// its own. Means are over real tokens, block sums in fp64 in position order.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// The request with every adaptive map of its pattern (also in members of a union) replaced by the map selected from the
// ranks' q [B, n, H, D] and k [B, m, Hk, D]. All ranks get the same. Collective where the request has more than one
// rank. No intermediate is larger than this rank's share of the query blocks times all key blocks.
PlanRequest select_blocks(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k, Communicator& comm,
                          const std::string& label);

}  // namespace annulus
