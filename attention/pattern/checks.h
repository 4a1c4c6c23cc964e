// What cannot be, and why. Used by parse.cc (which says where it stood) and pattern.cc; nothing is made here.
#pragma once

#include <string>

#include "attention/pattern/pattern.h"

namespace annulus {

constexpr int64_t kLongest = int64_t{1} << 40;  // positions
constexpr int kDeepest = 8;                     // unions within unions

// What no shape could have, in one line that says what would be valid; empty where there is nothing.
std::string fault_of(const PatternSpec& spec);

// Refuses what could be more than 2 GiB of slices, or selections as large. The pattern is otherwise valid for the
// shape.
void require_size(const PatternSpec& spec, const AttentionShape& shape);

// Error(kPlan) of this room.
[[noreturn]] void refuse_plan(const std::string& message);

}  // namespace annulus
