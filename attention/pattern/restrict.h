// What may be added to any pattern: only the past, only one's own document. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Holds no pair: an empty span, or a band that none of its pairs lies in.
bool is_empty(const Slice& slice);

// Key position <= query position.
void restrict_to_past(const AttentionShape& shape, std::vector<Slice>& slices);

// The parts of the slices within one document of spec.documents (and spec.key_documents). Costs what it returns, and
// a search for each slice and distinct list of documents.
std::vector<Slice> within_documents(const PatternSpec& spec, const AttentionShape& shape,
                                    const std::vector<Slice>& slices);

}  // namespace annulus
