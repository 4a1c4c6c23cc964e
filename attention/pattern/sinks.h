// Makes the slices of a window with sink tokens. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Appends the slices of a window with sink tokens, within the documents of `packed`: the window's own, and the pairs
// outside of it with sink tokens, which are the first keys of each document, or of the row if there are no documents.
// The specs must be valid for the shape.
void append_sinks(const PatternSpec& window, const PatternSpec& packed, const AttentionShape& shape,
                  std::vector<Slice>& slices);

}  // namespace annulus
