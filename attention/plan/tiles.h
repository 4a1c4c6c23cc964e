// Where pattern and layout meet: the one function that cuts a pattern into tiles. Used by every schedule.
#pragma once

#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/plan.h"

namespace annulus {

// Appends the tiles of one rank's queries (`query_spans`, in storage order) against the rows of `buffer`. Every counted
// pair of the two lies in as many tiles as the pattern counts it. Tiles without a pair are left out; rows and keys that
// can meet nothing are trimmed; a band that cuts nothing becomes unbounded. Order: by slice, then queries, then keys.
void append_tiles(const Pattern& pattern, const std::vector<Span>& query_spans, const RowSet& rows, int buffer,
                  int grad_buffer, std::vector<Tile>& tiles);

}  // namespace annulus
