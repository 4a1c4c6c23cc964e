// Slices of dilated attention. Used by pattern.cc.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus {

// The shape is validated and has queries and keys. Raises Error(kPlan) where that would be more than 2^26 slices.
void append_dilated(const DilatedSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices);

}  // namespace annulus
