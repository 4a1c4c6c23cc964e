// Makes the slices of sink tokens beside a window. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Appends, for a window with sink tokens, their pairs that are outside of the window. The sink tokens are the first
// keys of each document of `packed`, or of the row if it has no documents. The specs must be valid for the shape.
void append_sinks(const PatternSpec& window, const PatternSpec& packed, const AttentionShape& shape,
                  std::vector<Slice>& slices);

}  // namespace annulus
