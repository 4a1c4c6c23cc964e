// The words that stand for enumerators in pattern texts, in the enumerators' order, and what both reading and writing
// them need to know. Used by parse.cc and text.cc.
#pragma once

#include <array>
#include <string_view>

#include "attention/pattern/pattern.h"

namespace annulus {

inline constexpr std::array<std::string_view, 2> kOffsetsNames = {"modulo", "groups"};
inline constexpr std::array<std::string_view, 2> kCombineNames = {"lse", "mean"};
inline constexpr std::array<std::string_view, 9> kMapNames = {
    "local", "dilated", "global-local", "bigbird", "strided", "hierarchical", "adaptive", "file", "given"};
inline constexpr std::array<std::string_view, 2> kQueryNames = {"mean", "first"};

// Batch rows or heads of a slice that names none: all that there are.
inline constexpr Span kEverything = {0, 1, int64_t{1} << 40};

}  // namespace annulus
