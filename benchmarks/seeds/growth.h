// How cost grows with the length: the exponent that fits costs at several lengths best, and for the patterns whose
// growth is known what it should be. Used by seeds.cc and tests.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "benchmarks/report.h"

namespace annulus {

// The slope of the straight line through (log length, log cost) with the least squares: 1 for costs that are
// proportional to the length, 2 for its square. There are as many costs as lengths, at least 2 different lengths, and
// all are above 0.
double fitted_exponent(const std::vector<int64_t>& lengths, const std::vector<double>& costs);

struct GrowthCase {
  std::string name;
  std::optional<double> goal;  // the exponent should be at most this
  // The pattern for one length.
  PatternSpec (*pattern)(int64_t length);
  // The shortest of the lengths, of which each is twice the one before. Below it fixed costs weigh more.
  int64_t shortest;
};
// Windows, dilated segments and blocks with a number of key blocks for each query block that is fixed, which cost in
// proportion to the length; blocks of a fixed density and causal attention, whose cost grows with its square.
const std::vector<GrowthCase>& growth_cases();

struct GrowthOptions {
  int64_t shorten = 1;  // divides all lengths
  int64_t rounds = 5;
};

// Measures forward and backward of each case on one rank and one thread at four lengths: CPU seconds, least of
// interleaved rounds, and the bytes that LibTorch has allocated at most for a token. Prints a table. The ratios are the
// exponents.
std::vector<BenchRatio> run_growth(const GrowthOptions& options, std::ostream& out);

}  // namespace annulus
