// Where pattern and layout meet: the one function that cuts a pattern into tiles. Used by every schedule. Internal to
// attention/plan.
#pragma once

#include <vector>

#include "attention/plan/needs.h"
#include "attention/plan/plan.h"

namespace annulus {

// Appends the tiles of one rank's queries (`parts`, Needs::parts) against the rows of `buffer`; in the backward, with
// their gradients in `grad_buffer` (else -1), whose rows must hold all keys that `parts` meet in `rows`. Every counted
// pair of the two lies in as many tiles as the pattern counts it. Tiles without a pair are left out; rows and keys that
// can meet nothing are trimmed; a band that cuts nothing becomes unbounded. Order: by blocks, then slice and queries,
// then keys.
void append_tiles(const std::vector<QueryPart>& parts, int64_t heads_per_kv_head, const RowSet& rows, int buffer,
                  const RowSet& grad_rows, int grad_buffer, std::vector<Tile>& tiles);

}  // namespace annulus
