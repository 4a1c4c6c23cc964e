// Validates patterns and shapes. Used by parse.cc, which prepends the source of the pattern, by pattern.cc, and
// by the files that ask how far a pattern reaches.
// sizes.cc implements require_size.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

constexpr int64_t kLongest = int64_t{1} << 40;  // positions
constexpr int kDeepest = 8;                     // levels of unions within unions

// Returns one line on why the pattern is invalid for every shape, and what would be valid; "" if it is valid for some.
std::string fault_of(const PatternSpec& spec);

// Returns whether the pattern's own bounds show a query no later key. A window with `right` of 0 is causal by itself.
inline bool ends_with_query(const PatternSpec& spec) {
  return spec.causal || (spec.kind == PatternSpec::Kind::kWindow && spec.right == 0);
}

// Raises Error(kPlan) if the pattern could have more than 2 GiB of slices or of selected blocks. The pattern must be
// valid for the shape in all other respects.
void require_size(const PatternSpec& spec, const AttentionShape& shape);

// Raises Error(kPlan) from the module "pattern".
[[noreturn]] void refuse_plan(const std::string& message);

}  // namespace annulus
