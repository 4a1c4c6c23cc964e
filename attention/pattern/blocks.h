// Block maps of the named kinds, and slices of block maps. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// For a map that needs neither q and k nor a file; the shape is validated. Where causal, without future blocks.
BlockMap named_block_map(const BlocksSpec& spec, bool causal, const AttentionShape& shape);

// The same map without the blocks whose first key comes after the last query of the query block.
BlockMap without_future(const BlockMap& map, const AttentionShape& shape);

// The shape is validated against the map and has queries and keys. Each run of a query block is one slice; runs that
// are equal in neighbouring query blocks are one taller slice; heads and batch rows that follow each other with equal
// maps share their slices.
void append_blocks(const BlockMap& map, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
