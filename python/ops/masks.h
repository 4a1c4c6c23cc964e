// The masks of tokens that a Python process has made, by their digests, which patterns name. The object of Python that
// made a mask keeps it, and so does what autograd saves for a backward. Used by call.cc and operators.cc. Thread safe.
#pragma once

#include <memory>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus::torch_ops {

// Returns the pattern with the masks that it names by a digest alone: of equal ones the latest that holds these bits,
// if there is one. One that no longer exists, or never did, stays unknown, and is refused when the pattern's slices are
// made.
PatternSpec with_known_masks(PatternSpec spec, const HeldBits& bits);

// Returns these masks of a pattern, to keep them.
std::vector<std::shared_ptr<const TokenMask>> known_masks(const PatternSpec& spec);

}  // namespace annulus::torch_ops
