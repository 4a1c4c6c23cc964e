// Helpers for planted mistakes (planted_mistakes.h): ways to change plans, and the list of mistakes in tiles.
#pragma once

#include <vector>

#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::testing {

using Programs = std::vector<Program>;

PlanRequest with(PlanRequest request, ScheduleKind schedule);
// Full attention in contiguous parts, so that no band cuts a tile.
PlanRequest all_pairs(ScheduleKind schedule);
PlanRequest no_pairs();

int add_buffer(Program& p, BufferKind kind, const RowSet& rows);
RowSet rows_of(const Program& p, int buffer);
// Returns the first transfer to or from a peer in the transfers of a step.
Transfer& transfer_with(std::vector<Transfer>& transfers, int peer);
// Adds a transfer: `from` sends `rows` of a buffer at a step, `to` receives them in `into`.
void transfer(Programs& p, int from, int buffer, int to, int into, size_t step, bool backward, const RowSet& rows);
// Returns the rows with one more position at the end of each block.
RowSet longer(RowSet rows);

// Defined in planted_tiles.cc.
std::vector<Mistake> of_tiles();
std::vector<Mistake> of_gradients();
// Defined in planted_queries.cc.
std::vector<Mistake> of_queries();
// Defined in planted_schedules.cc.
std::vector<Mistake> of_schedules_over_groups();

}  // namespace annulus::testing
