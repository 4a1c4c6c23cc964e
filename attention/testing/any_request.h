// Random plan requests for property tests of plans, the verifier and attention: any pattern, layout, schedule and
// number of ranks, and shapes from empty to a few blocks. Call these functions within a rapidcheck property.
#pragma once

#include "attention/plan/plan.h"

namespace annulus::testing {

// Returns any number of batch rows and heads, of queries and keys, and any query offset.
AttentionShape any_shape();

// Returns a request whose patterns fit the shape. One in six requests has a block map that is given as data, alone or
// in a union. The text names such a map only by digest.
PlanRequest any_request(const AttentionShape& shape = any_shape());

// Makes inner groups of one rank where the schedule could not divide the query heads among those of the request, whose
// ranks were changed.
void fit_heads(PlanRequest& request);

// Returns the request with such maps written as slices, so that its text is complete.
PlanRequest written_out(PlanRequest request);

}  // namespace annulus::testing
