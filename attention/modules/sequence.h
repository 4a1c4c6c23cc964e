// Derives the distribution of a sequence over ranks from the number of positions on each rank, and checks that all
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

// The numbers of positions on each rank, in rank order.
struct SequenceParts {
  std::vector<int64_t> queries;
  std::vector<int64_t> keys;
  bool keep_last = true;      // PlanRequest::keep_last, if every rank allows it
  bool lse_gradient = false;  // some rank needs the gradient of lse
  int64_t free_bytes = 0;     // what terms_in_job() takes: the least of all ranks, to a MiB; 0: not known, or not asked
};

// A rank's contribution to the agreement.
struct CallTerms {
  int64_t queries = 0, keys = 0;  // positions on this rank
  std::vector<Field> alike;       // must be equal on all ranks
  bool keep_last = true;          // PlanRequest::keep_last is possible on this rank
  bool lse_gradient = false;      // this rank needs the gradient of lse
  int64_t free_bytes = 0;         // of this rank (attention/execution/terms_in_job.h), where `auto` chooses
};

// Collective. `find` validates this rank's arguments. If it raises on any rank, all ranks raise (agree_together).
SequenceParts agree_on_call(const std::function<CallTerms()>& find, Communicator& comm, OpLabel label);

// Sets ranks, lengths and keep_last of the request. The contiguous layout accepts any parts that are equal for queries
// and keys; otherwise the parts must be those of layout_counts. Raises Error(kPlan), the same on every rank, if they
// are not.
void place_sequence(PlanRequest& request, const SequenceParts& parts);

}  // namespace annulus
