// Slices of dilated attention. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// The shape is validated and has queries and keys.
void append_dilated(const DilatedSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
