// Schedules: each makes one rank's steps. A new schedule is a function here and a name in plan.cc; the executor, the
// verifier and the kernels need no change.
#pragma once

#include "attention/plan/plan.h"

namespace annulus {

// What a schedule works on: the program to fill (request, rank, spans are set; buffers 0 and 1 are kOwnKV and
// kOwnGrad), the pattern, and every rank's key rows.
struct ScheduleInput {
  const Pattern& pattern;
  const Layout& keys;
  // The rows that `owner` owns: all batch rows, all kv heads, its positions.
  RowSet rows_of(int owner) const;
};

inline constexpr int kOwnKVBuffer = 0;
inline constexpr int kOwnGradBuffer = 1;

// Store and forward: key/value blocks go round the ring rank -> rank + 1, P - 1 hops. The backward runs the other way
// from the block held last, so that blocks come by in reverse order and no block is fetched again that is still there;
// dK/dV arrive while their block is computed, get this rank's part added, and travel on one step behind. A rank's own
// block comes last and hides the last gradient hop. (Ring Attention, arXiv 2310.01889; the order is
// docs/attention.md's.)
void make_ring(const ScheduleInput& input, Program& program);

// Every rank gets every block straight from its owner, computing its own meanwhile; gradients return to their owners
// and are added there in rank order. Holds the whole sequence's K and V at once: for short sequences.
void make_all_gather(const ScheduleInput& input, Program& program);

}  // namespace annulus
