// Restricts the slices of any pattern: to past keys, to the query's own document, to keys that are no padding, or to
// the pairs that a mask of tokens shows. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

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
