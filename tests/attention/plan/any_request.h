// Random plan requests for property tests of plans, the verifier and attention: any pattern, layout, schedule and
// number of ranks, shapes from empty to a few blocks. Called within a rapidcheck property.
#pragma once

#include "attention/plan/plan.h"

namespace annulus::testing {

// One in six has a block map made by a program, alone or in a union: its text names it by digest alone.
PlanRequest any_request();

// The same with such maps as slices: its text says all of it.
PlanRequest written_out(PlanRequest request);

}  // namespace annulus::testing
