// Cuts a pattern into tiles by the layout, for all schedules (schedules.cc). Internal to attention/plan.
#pragma once

#include <vector>

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

// Appends the tiles of one rank's queries (`parts`, from Needs::parts) with the rows of `buffer`. In the backward the
// tiles' gradients are added to `grad_buffer`, whose rows must contain all keys of `rows` that `parts` need; in the
// forward grad_buffer is -1. Every pair is in as many tiles as the pattern counts it. Empty tiles are omitted, leading
// and trailing queries and keys without a pair are trimmed, and a side of a band that cuts nothing becomes unbounded.
// The tiles are ordered by block, then by slice and queries, then by keys.
void append_tiles(const std::vector<QueryPart>& parts, int64_t heads_per_kv_head, const RowSet& rows, int buffer,
                  const RowSet& grad_rows, int grad_buffer, std::vector<Tile>& tiles);

}  // namespace annulus
