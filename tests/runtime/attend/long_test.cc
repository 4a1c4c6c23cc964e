// Long sequences with drawn rows checked: 131,072 tokens over 4 ranks for every kind of pattern whose pairs grow with
// the length, and 8,192 for those whose pairs grow with its square. long_sweep_test.cc has longer ones.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tests/runtime/attend/long_patterns.h"

namespace annulus::long_test {
namespace {

using Named = std::pair<std::string, std::string>;

constexpr int64_t kLength = 131072;

class Long : public ::testing::TestWithParam<Named> {};

TEST_P(Long, DrawnRowsAndKeysAreThoseOfTheOracle) {
  // combine = "mean" needs a head for each branch.
  testing::expect_long_checked(GetParam().second, kLength, GetParam().first == "mean" ? 2 : 1);
}

INSTANTIATE_TEST_SUITE_P(Attend, Long, ::testing::ValuesIn(testing::long_patterns(kLength)), [](const auto& info) {
  std::string name = info.param.first;
  std::erase(name, '-');
  return name;
});

TEST(LongSquare, DrawnRowsAndKeysAreThoseOfTheOracle) {
  for (const char* const kind : {"full", "causal"}) {
    SCOPED_TRACE(kind);
    testing::expect_long_checked("{ kind = '" + std::string(kind) + "' }", 8192);
  }
}

}  // namespace
}  // namespace annulus::long_test
