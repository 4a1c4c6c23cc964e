// Longer sequences than those of long_test.cc: a million tokens for patterns whose pairs grow with the length, 131,072
// for a causal one. Runs with --all.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/runtime/attend/long_patterns.h"

namespace annulus::long_sweep_test {
namespace {

TEST(LongSweep, DrawnRowsOfAMillionTokensAreThoseOfTheOracle) {
  constexpr int64_t kLength = int64_t{1} << 20;
  for (const auto& [name, pattern] : testing::long_patterns(kLength)) {
    SCOPED_TRACE(name);
    testing::expect_long_checked(pattern, kLength, name == "mean" ? 2 : 1);
  }
}

TEST(LongSweep, DrawnRowsOfALongCausalSequenceAreThoseOfTheOracle) {
  testing::expect_long_checked("{ kind = 'causal' }", 131072);
}

}  // namespace
}  // namespace annulus::long_sweep_test
