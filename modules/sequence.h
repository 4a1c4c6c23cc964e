// How a sequence lies over the ranks, told from how many of its positions each rank holds: for callers that have
// tensors rather than a request. Used by MultiheadAttention and by torch_ops. Thread safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"
#include "comm/communicator.h"

namespace annulus {

// Positions that each rank holds, in rank order.
struct SequenceParts {
  std::vector<int64_t> queries;
  std::vector<int64_t> keys;
};

// Collective, unless there is one rank: one small exchange.
SequenceParts exchange_lengths(int64_t queries, int64_t keys, Communicator& comm);

// Sets ranks and lengths of the request. The layout contiguous takes any parts that queries and keys have in common;
// any other layout, and queries and keys of different parts, must be what make_layout deals: otherwise Error(kPlan),
// alike on every rank.
void place_sequence(PlanRequest& request, const SequenceParts& parts);

// Positions of one rank's rows in storage order, plus offset: int64 [n].
at::Tensor positions_of(const Layout& layout, int rank, int64_t offset);

}  // namespace annulus
