// Makes the block maps of the named kinds, and makes slices from block maps. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Makes a map that needs neither q and k nor a file. The shape has been validated. If `causal`, the map contains no
// future blocks.
BlockMap named_block_map(const BlocksSpec& spec, bool causal, const AttentionShape& shape);

// The same map without the blocks whose first key comes after the last query of the query block.
BlockMap without_future(const BlockMap& map, const AttentionShape& shape);

// Appends the slices of a map. The shape has been validated against the map and has queries and keys. Each run of a
// query block becomes one slice. Equal runs of neighbouring query blocks become one taller slice, and neighbouring
// heads and batch rows with equal maps share their slices.
void append_blocks(const BlockMap& map, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
