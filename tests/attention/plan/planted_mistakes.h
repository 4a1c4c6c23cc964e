// Plans with one mistake each, for the tests of the verifier and of the proof that ranks make together. Each check of
// the verifier finds at least one of them (the planted faults in tests/mutants remove the checks one by one).
#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus::testing {

struct Mistake {
  std::string name;
  PlanRequest request;  // of a correct plan
  std::function<void(std::vector<Program>&)> plant;
  std::string finding;       // part of the fault that the verifier of the whole plan reports
  bool between_two = false;  // only the comparison of what ranks transfer and compute finds it
};

void PrintTo(const Mistake& mistake, std::ostream* out);  // prints the name for GoogleTest

const std::vector<Mistake>& planted_mistakes();

// Returns the programs of all ranks, in rank order.
std::vector<Program> programs_of(const PlanRequest& request);

// Returns a request for a ring of four ranks: one batch row, two query heads of one kv head, causal, zigzag.
PlanRequest ring_of_four();

// Returns a request of three batch rows and two kv heads, whose patterns differ, so that buffers have several blocks.
PlanRequest several_blocks(ScheduleKind schedule);

}  // namespace annulus::testing
