// The names of enumerators in the texts of patterns, in the enumerators' order. Used by parse.cc, text.cc and the files
// of this package that validate or cut specs.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "attention/pattern/pattern.h"

namespace annulus {

inline constexpr std::array<std::string_view, 2> kOffsetsNames = {"modulo", "groups"};
inline constexpr std::array<std::string_view, 2> kCombineNames = {"lse", "mean"};
inline constexpr std::array<std::string_view, 9> kMapNames = {
    "local", "dilated", "global-local", "bigbird", "strided", "hierarchical", "adaptive", "file", "given"};
inline constexpr std::array<std::string_view, 2> kQueryNames = {"mean", "first"};

// The default of a slice's batch rows or heads: all of them.
inline constexpr Span kEverything = {0, 1, int64_t{1} << 40};

inline std::string str(int64_t value) { return std::to_string(value); }

}  // namespace annulus
