// The verifier proves a plan before any rank starts: that running it computes every counted pair exactly as often as
// the pattern counts it, cannot deadlock, never reads a buffer that is not filled nor overwrites one in use, and brings
// every gradient home. Used by tests, by `annulus plan`, and by `attend` and `train` before they send anything.
//
// It shares no code with the planner's intersection. Pairs are not enumerated but fingerprinted: batch row b, head h,
// query q and key k get random weights in the field of 2^61 - 1 elements, a set of pairs has the sum of the products of
// its weights, and two multisets that differ have equal sums with probability below 2^-58 (Schwartz, JACM 27(4), 1980;
// Zippel, EUROSAM 1979). Bands over arithmetic progressions are summed with prefix sums, so that the work is in tiles
// and rows, not in pairs. Everything else (transfers, order, buffers) is followed exactly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

struct Proof {
  std::vector<std::string> faults;  // empty: the plan is right. Each names rank, direction and step.
  int64_t tiles = 0;
  int64_t transfers = 0;
  int64_t pairs = 0;  // counted pairs of the pattern, all heads and batch rows

  bool holds() const { return faults.empty(); }
};

// All ranks' programs of one plan, in rank order. At most `max_faults` faults are listed. Raises Error(kPlan) when the
// programs do not belong together. Thread-safe.
Proof verify(const std::vector<Program>& programs, int max_faults = 8);
// Of programs that were made for other slices than the request's pattern.
Proof verify(const std::vector<Program>& programs, const Pattern& pattern, int max_faults = 8);

// The same for the plan of a request: makes all programs.
Proof verify(const PlanRequest& request, int max_faults = 8);

}  // namespace annulus
