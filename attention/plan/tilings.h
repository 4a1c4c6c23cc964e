// Counts what a forward sends, for `annulus plan` and reports, in each tiling of the pairs of ranks, in which a rank
// computes all heads of the queries of b ranks with the keys of P / b (the schedule mesh; b = 1 is group-cast).
//
// No schedule that moves keys and values alone sends less than group-cast: every row must reach each rank that needs
// it. Tilings move queries and partial results as well and may send less (Mesh-Attention, arXiv 2512.20968), and so may
// schedules that divide heads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// What all ranks together send in a forward of one tiling.
struct Tiling {
  int columns = 1;        // b
  double kv_rows = 0;     // rows of K and of V, counted separately
  double query_rows = 0;  // and as many of results
  // Returns the bytes, with partial results in the accumulator's dtype.
  double bytes(int64_t head_dim, int64_t bytes, int64_t wide) const;
};

// Returns the tilings of each b that divides the ranks, ascending. Raises like validate. Thread safe.
std::vector<Tiling> tilings(const PlanRequest& request);

}  // namespace annulus
