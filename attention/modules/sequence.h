// Finds out how a sequence lies over the ranks from how many of its positions each rank holds, and checks that all
// ranks make the same call, for callers that have tensors rather than a request. Used by MultiheadAttention and by
// python/ops. Thread safety: functions without state.
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
  bool keep_last = true;      // every rank can keep what it holds last (PlanRequest)
  bool lse_gradient = false;  // some rank has a gradient of lse
};

// What a rank contributes to a call.
struct CallTerms {
  int64_t queries = 0, keys = 0;  // positions it holds
  std::vector<Field> alike;       // what must be the same on every rank
  bool keep_last = true;          // this rank can keep what it holds last
  bool lse_gradient = false;      // this rank has a gradient of lse
};

// Collective. `find` checks what this rank was given and raises if it is invalid; then all ranks raise
// (agree_together).
SequenceParts agree_on_call(const std::function<CallTerms()>& find, Communicator& comm, OpLabel label);

// Sets ranks, lengths and keep_last of the request. With the layout contiguous, any parts are accepted that are the
// same for queries and keys; otherwise the parts must be those of make_layout. Raises Error(kPlan), alike on every
// rank, if they are not.
void place_sequence(PlanRequest& request, const SequenceParts& parts);

}  // namespace annulus
