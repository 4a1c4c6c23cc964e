// Checks of patterns before a job begins: for training (layer_requests.cc) and attend (attend.cc).
#pragma once

#include "attention/pattern/pattern.h"
#include "attention/plan/plan.h"

namespace annulus {

// The pattern with each adaptive map replaced by one that keeps as many blocks: those nearest to the diagonal. It can
// be made, checked and counted before there are queries and keys.
PatternSpec with_nearest_blocks(const PatternSpec& spec, const AttentionShape& shape);

// Raises Error(kPlan) for all that can be wrong with a request before there are queries and keys, its pattern for its
// shape included; block maps of files have been read. The pattern that is made on the way is kept for the plan.
void check_request(const PlanRequest& request);

}  // namespace annulus
