// How the planted mistakes (planted_mistakes.h) change plans, and the lists of them.
#pragma once

#include <vector>

#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::testing {

using Programs = std::vector<Program>;

PlanRequest with(PlanRequest request, ScheduleKind schedule);
// Every pair, in contiguous parts: no band cuts a tile.
PlanRequest all_pairs(ScheduleKind schedule);
PlanRequest no_pairs();

int add_buffer(Program& p, BufferKind kind, const RowSet& rows);
RowSet rows_of(const Program& p, int buffer);
// The first transfer of a step to or from a peer.
Transfer& transfer_with(std::vector<Transfer>& transfers, int peer);
// One more transfer: `from` sends `rows` of a buffer at a step, `to` receives them in `into`.
void transfer(Programs& p, int from, int buffer, int to, int into, size_t step, bool backward, const RowSet& rows);
// The same rows with one more position behind them, in each block.
RowSet longer(RowSet rows);

// Of planted_tiles.cc.
std::vector<Mistake> of_tiles();
std::vector<Mistake> of_gradients();

}  // namespace annulus::testing
