// Makes the slices of dilated attention. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// Appends one slice for each segment and offset of each branch. The shape must be valid, with queries and keys.
void append_dilated(const DilatedSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
