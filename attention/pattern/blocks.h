// Makes the block maps of the named kinds, and makes slices from block maps. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Makes a map that depends on neither q and k nor a file. The shape must be valid. If `causal`, the map has no future
// blocks.
BlockMap named_block_map(const BlocksSpec& spec, bool causal, const AttentionShape& shape);

// Returns the map without the key blocks whose first key follows the last query of the query block.
BlockMap without_future(const BlockMap& map, const AttentionShape& shape);

// Appends the slices of a map. The shape must be valid for the map, with queries and keys. Each run of a query block
// becomes one slice. Equal runs of adjacent query blocks are merged into one slice, and adjacent heads and batch rows
// with equal maps share their slices.
void append_blocks(const BlockMap& map, const AttentionShape& shape, std::vector<Slice>& slices);

// The same for one head of a map with one batch row, whose slices count for these batch rows and heads. A mask of
// tokens numbers its planes as heads (token_mask.h).
void append_plane_blocks(const BlockMap& map, int64_t plane, const AttentionShape& shape, const Span& batch,
                         const Span& heads, std::vector<Slice>& slices);

}  // namespace annulus
