// Finds what is wrong with patterns and shapes and says so; nothing is made here. Used by parse.cc, which adds where
// the pattern was written, and by pattern.cc. sizes.cc implements require_size.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

constexpr int64_t kLongest = int64_t{1} << 40;  // positions
constexpr int kDeepest = 8;                     // levels of unions within unions

// Describes in one line what makes the pattern invalid for every shape, and what would be valid. Empty if nothing does.
std::string fault_of(const PatternSpec& spec);

// Raises Error(kPlan) if the pattern could have more than 2 GiB of slices, or select that many blocks. In all other
// respects the pattern is valid for the shape.
void require_size(const PatternSpec& spec, const AttentionShape& shape);

// Raises Error(kPlan) of the room "pattern".
[[noreturn]] void refuse_plan(const std::string& message);

}  // namespace annulus
