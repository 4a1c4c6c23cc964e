// Random plan requests for property tests of plans, the verifier and attention: any pattern, layout, schedule and
// number of ranks, shapes from empty to a few blocks. Called within a rapidcheck property.
#pragma once

#include "attention/plan/plan.h"

namespace annulus::testing {

PlanRequest any_request();

}  // namespace annulus::testing
