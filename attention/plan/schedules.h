// Schedules: functions that make one rank's steps. A new schedule needs a function here and a line in plan.cc; the
// executor, the verifier and the kernels need no change. Internal to attention/.
#pragma once

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

inline constexpr int kOwnKVBuffer = 0;
inline constexpr int kOwnGradBuffer = 1;

// Each function adds buffers and steps to `program`, whose request, rank, spans and buffers 0 (kOwnKV) and 1 (kOwnGrad)
// are set.

// Ring: key/value blocks travel from rank to rank + 1, without the rows that no later rank needs. If the last rank
// needs every row that any other rank needs (full, causal zigzag), the backward runs in the opposite direction, from
// the block that each rank held last and saved. Otherwise it runs in the direction of the forward. The dK/dV of a block
// arrive while the rank computes with the block; the rank adds its part and sends the sum in the next step, and the
// last rank that needs the block sends it directly to the owner. (Ring Attention, arXiv 2310.01889;
// docs/explanation/attention.md describes this order of steps.)
void make_ring(Needs& needs, Program& program);

// All-gather: every rank receives, directly from the owners, all rows that any rank other than the owner needs, and
// computes the tiles of its own rows meanwhile. Gradients return to the owners, which add them in rank order. Suits
// short sequences.
void make_all_gather(Needs& needs, Program& program);

// Group-cast: all-gather in which each rank receives only the rows that it needs itself. No schedule sends less.
void make_group_cast(Needs& needs, Program& program);

}  // namespace annulus
