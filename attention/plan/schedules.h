// Schedules: functions that make one rank's steps. A new schedule needs a function here and a line in plan.cc; the
// executor, the verifier and the kernels need no change. Internal to attention/.
#pragma once

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

inline constexpr int kOwnKVBuffer = 0;
inline constexpr int kOwnGradBuffer = 1;

// Each function adds buffers and steps to `program`, in which request, rank, spans and the buffers 0 (kOwnKV) and 1
// (kOwnGrad) are already set.

// Ring: key/value blocks travel from rank to rank + 1, and rows that no rank further along needs are not sent on. If
// the last rank needs every row that any other rank needs (full, causal zigzag), the backward runs in the opposite
// direction and starts with the block that each rank held last, which need not be sent again. Otherwise it runs in the
// same direction as the forward. The dK/dV of a block arrive while the rank computes with the block; the rank adds its
// part and sends the sum in the next step, and the last rank that needs the block sends it straight to the owner. (Ring
// Attention, arXiv 2310.01889; docs/attention.md describes this order of steps.)
void make_ring(Needs& needs, Program& program);

// All-gather: every rank receives, straight from the owners, all rows that any rank other than the owner needs, and
// computes its own tiles meanwhile. Gradients return to the owners, which add them in rank order. Suits short
// sequences.
void make_all_gather(Needs& needs, Program& program);

// Group-cast: the same, but each rank receives only the rows that it needs itself. No schedule sends less.
void make_group_cast(Needs& needs, Program& program);

}  // namespace annulus
