// Makes the slices of each kind of pattern, one file a kind, and restricts those of any (restrict.cc). Shapes must be
// valid, with queries and keys. Internal to attention/pattern: pattern.cc puts the slices together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus {

// ---- dilated.cc

// Appends one slice for each segment and offset of each branch.
void append_dilated(const DilatedSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

// ---- sinks.cc

// Appends the slices of a window with sink tokens, within the documents of `packed`: the window's own, and the pairs
// outside of it with sink tokens, which are the first keys of each document, or of the row if there are no documents.
// The specs must be valid for the shape.
void append_sinks(const PatternSpec& window, const PatternSpec& packed, const AttentionShape& shape,
                  std::vector<Slice>& slices);

// ---- tree.cc

// Returns one line on why these are not the nodes of trees in depth-first order, and what would be; "" if they are.
std::string tree_fault(const std::vector<int64_t>& lengths, const std::vector<int64_t>& parents);

// Appends one slice for each node with tokens of each batch row: its subtree's queries with its own tokens as keys.
// Neighbouring rows with equal trees share their slices. The spec must be valid for the shape.
void append_tree(const TreeSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

// ---- blocks.cc

// Makes a map that depends on neither q and k nor a file. If `causal`, the map has no future blocks.
BlockMap named_block_map(const BlocksSpec& spec, bool causal, const AttentionShape& shape);

// Returns the map without the key blocks whose first key follows the last query of the query block.
BlockMap without_future(const BlockMap& map, const AttentionShape& shape);

// Appends the slices of a map. The shape must be valid for the map. Each run of a query block becomes one slice. Equal
// runs of adjacent query blocks are merged into one slice, and adjacent heads and batch rows with equal maps share
// their slices.
void append_blocks(const BlockMap& map, const AttentionShape& shape, std::vector<Slice>& slices);

// The same for one head of a map with one batch row, whose slices count for these batch rows and heads. A mask of
// tokens numbers its planes as heads (token_mask.h).
void append_plane_blocks(const BlockMap& map, int64_t plane, const AttentionShape& shape, const Span& batch,
                         const Span& heads, std::vector<Slice>& slices);

// ---- restrict.cc

// Returns whether the slice contains no pair: a span is empty, or the band excludes all its queries and keys.
bool is_empty(const Slice& slice);

// Restricts the slices to pairs with key position <= query position.
void restrict_to_past(const AttentionShape& shape, std::vector<Slice>& slices);

// Neighbouring rows of the batch that are packed alike, and where their documents of queries and of keys begin, with
// the end of the last one: document d has the queries [queries[d], queries[d + 1]).
struct PackedRows {
  Span batch;
  std::vector<int64_t> queries, keys;
};

// Returns all rows of the batch by spec.documents (and spec.key_documents); without documents each row is one.
std::vector<PackedRows> packed_rows(const PatternSpec& spec, const AttentionShape& shape);

// Returns the parts of the slices that lie within one document of spec.documents (and spec.key_documents). The cost is
// proportional to the number of parts, plus a search for each slice and each distinct list of documents.
std::vector<Slice> within_documents(const PatternSpec& spec, const AttentionShape& shape,
                                    const std::vector<Slice>& slices);

// Returns the parts of the slices with the keys of spec.kept_keys.
std::vector<Slice> within_kept_keys(const PatternSpec& spec, const AttentionShape& shape,
                                    const std::vector<Slice>& slices);

// Returns the parts of the slices that lie within blocks of a mask, each of which is shown whole or names its plane.
// Appends these planes to `planes`. No slice may name one already.
std::vector<Slice> within_mask(const std::shared_ptr<const TokenMask>& mask, const AttentionShape& shape,
                               const std::vector<Slice>& slices, MaskPlanes& planes);

}  // namespace annulus
