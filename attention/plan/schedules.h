// Schedules: each makes one rank's steps. A new schedule is a function here and a name in plan.cc; the executor, the
// verifier and the kernels need no change. Internal to attention/, but for the buffers' numbers.
#pragma once

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

inline constexpr int kOwnKVBuffer = 0;
inline constexpr int kOwnGradBuffer = 1;

// Each fills `program`: request, rank and spans are set, buffers 0 and 1 are kOwnKV and kOwnGrad.

// Store and forward: key/value blocks go round the ring rank -> rank + 1; what no rank ahead needs stays behind. Where
// the last rank needs all that any other does (full, causal zigzag), the backward runs the other way from the block
// held last, so that no block is fetched again that is still there; else it runs the same way once more. dK/dV arrive
// while their block is computed, get this rank's part added, and travel on one step behind, from the last rank that
// needs the block straight home. (Ring Attention, arXiv 2310.01889; the order is docs/attention.md's.)
void make_ring(Needs& needs, Program& program);

// Every rank gets, straight from their owner, all rows that any other rank than the owner needs, computing its own
// meanwhile; gradients return to their owners and are added there in rank order. For short sequences.
void make_all_gather(Needs& needs, Program& program);

// The same, but each rank gets only the rows that it needs itself: no schedule sends less.
void make_group_cast(Needs& needs, Program& program);

}  // namespace annulus
