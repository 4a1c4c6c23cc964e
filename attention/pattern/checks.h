// Validates patterns and shapes. Used by parse.cc, which prepends the source of the pattern, and by pattern.cc.
// sizes.cc implements require_size.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

constexpr int64_t kLongest = int64_t{1} << 40;  // positions
constexpr int kDeepest = 8;                     // levels of unions within unions

// Returns one line on why the pattern is invalid for every shape, and what would be valid; "" if it is valid for some.
std::string fault_of(const PatternSpec& spec);

// Raises Error(kPlan) if the pattern could have more than 2 GiB of slices or of selected blocks. The pattern must be
// valid for the shape in all other respects.
void require_size(const PatternSpec& spec, const AttentionShape& shape);

// Raises Error(kPlan) from the module "pattern".
[[noreturn]] void refuse_plan(const std::string& message);

}  // namespace annulus
