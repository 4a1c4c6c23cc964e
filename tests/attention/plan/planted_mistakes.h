// Plans with one mistake each, for the tests of the verifier and of the proof that ranks make together: each check of
// the verifier has one that it finds (tests/mutants drops them in turn).
#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus::testing {

struct Mistake {
  std::string name;
  PlanRequest request;  // of a plan that is right
  std::function<void(std::vector<Program>&)> plant;
  std::string finding;       // part of what the whole verifier says
  bool between_two = false;  // every rank's program is right alone: only the comparison of transfers finds it
};

void PrintTo(const Mistake& mistake, std::ostream* out);  // GoogleTest's name for it

const std::vector<Mistake>& planted_mistakes();

// All ranks' programs, in rank order.
std::vector<Program> programs_of(const PlanRequest& request);

// Four ranks, one batch row, two query heads of one kv head, causal, zigzag: a ring.
PlanRequest ring_of_four();

// Three batch rows and two kv heads, whose blocks differ from row to row and from head to head: buffers of several
// blocks.
PlanRequest several_blocks(ScheduleKind schedule);

}  // namespace annulus::testing
