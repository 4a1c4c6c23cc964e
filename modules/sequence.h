// How a sequence lies over the ranks, told from how many of its positions each rank holds, and that all ranks mean the
// same call: for callers that have tensors rather than a request. Used by MultiheadAttention and by torch_ops. Thread
// safety: functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "attention/plan/plan.h"
#include "comm/agreement.h"
#include "comm/communicator.h"

namespace annulus {

// Positions that each rank holds, in rank order.
struct SequenceParts {
  std::vector<int64_t> queries;
  std::vector<int64_t> keys;
  bool keep_last = true;  // every rank can keep what it holds last (PlanRequest)
};

// What a rank brings to a call.
struct CallTerms {
  int64_t queries = 0, keys = 0;  // positions it holds
  std::vector<Field> alike;       // what must be the same on every rank
  bool keep_last = true;          // this rank can keep what it holds last
};

// find() looks at what this rank was given and raises when it cannot be: see agree_together. Collective.
SequenceParts agree_on_call(const std::function<CallTerms()>& find, Communicator& comm, OpLabel label);

// Sets ranks, lengths and keep_last of the request. The layout contiguous takes any parts that queries and keys have in
// common; any other layout, and queries and keys of different parts, must be what make_layout deals: otherwise
// Error(kPlan), alike on every rank.
void place_sequence(PlanRequest& request, const SequenceParts& parts);

}  // namespace annulus
