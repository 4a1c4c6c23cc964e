// Tests benchmarks/patterns.h: what is measured, not how long it takes.
#include "benchmarks/patterns.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"

namespace annulus::patterns_test {
namespace {

TEST(RandomBlockMap, HasItsDensityAndTheWholeDiagonal) {
  for (const int64_t heads : {1, 4}) {
    const BlockMap map = random_block_map(128, heads, 128, 0.1);
    EXPECT_NEAR(map.density(), 0.1, 0.001);
    const std::vector<uint8_t> active = map.dense();
    for (int64_t row = 0; row < heads * 128; ++row) {
      EXPECT_EQ(active[static_cast<size_t>(row * 128 + row % 128)], 1) << row;
    }
    EXPECT_EQ(map.digest(), random_block_map(128, heads, 128, 0.1).digest());
  }
  // A map of few blocks is denser, because the blocks on the diagonal are always active.
  EXPECT_DOUBLE_EQ(random_block_map(128, 1, 2, 0.1).density(), 0.5);
  EXPECT_DOUBLE_EQ(random_block_map(128, 1, 3, 1.0).density(), 1);
}

TEST(BenchPatterns, GoalPatternsHaveTheirStatedShares) {
  const PatternsBenchOptions options;
  const double dense = static_cast<double>(options.heads * options.length * options.length);
  std::vector<std::pair<std::string, double>> goals;
  for (const BenchPattern& p : bench_patterns(options)) {
    const double share = static_cast<double>(count_pairs(make_pattern(p.spec, options.shape()))) / dense;
    EXPECT_GT(share, 0) << p.name;
    EXPECT_LT(share, 1) << p.name;
    if (p.goal_of_share) goals.emplace_back(p.name, *p.goal_of_share);
    if (p.name.starts_with("blocks")) {
      EXPECT_NEAR(share, 0.1, 0.001) << p.name;
    }
    // The sum over branches of segment / rate^2; pairs of two branches count twice.
    if (p.name == "dilated") {
      EXPECT_DOUBLE_EQ(share, (2048 + 4096 / 4. + 8192 / 16. + 16384 / 64.) / 16384);
    }
    // Each of 16 rollouts has the prompt, a quarter of the row, its beginning and its end.
    if (p.name == "tree") {
      const double ends = 16 * 512 * (4096 + 1024 + 513 / 2.), beginnings = 4 * 1024 * (4096 + 1025 / 2.);
      EXPECT_DOUBLE_EQ(share, (ends + beginnings + 4096 * 4097 / 2.) / (16384. * 16384));
    }
    if (p.name == "window 256") {
      EXPECT_DOUBLE_EQ(share, (256 * 16384. - 256 * 255 / 2.) / (16384. * 16384));
    }
  }
  EXPECT_EQ(goals, (std::vector<std::pair<std::string, double>>{{"blocks, density 0.1", 1.1},
                                                                {"blocks, density 0.1, a map per head", 1.1},
                                                                {"dilated", 1.1},
                                                                {"window 1024", 1.12},
                                                                {"window 256", 1.3},
                                                                {"window 1024, 4 sink tokens", 1.15},
                                                                {"tree", 1.15}}));
}

TEST(BenchPatterns, UserPatternsReplaceTheListWithoutDuplicates) {
  PatternsBenchOptions options;
  options.patterns = {"{ kind = \"causal\" }", "{kind=\"causal\"}", "{ kind = \"window\", left = 3, right = 0 }"};
  EXPECT_EQ(bench_patterns(options).size(), 2u);
  options.patterns = {"{ kind = \"casual\" }"};
  EXPECT_THROW(bench_patterns(options), Error);
  options.patterns = {"{ kind = \"documents\", documents = [5, 6] }"};
  EXPECT_THROW(bench_patterns(options), Error);
}

TEST(PatternsBench, GivesEachRatioOnceForSmallSizes) {
  PatternsBenchOptions options;
  options.length = 300;  // not a multiple of any block size
  options.heads = 2;
  options.head_dim = 8;
  options.rounds = 2;
  std::ostringstream out;
  const std::vector<BenchRatio> ratios = run_patterns_bench(options, out);
  ASSERT_EQ(ratios.size(), bench_patterns(options).size());
  std::set<std::string> names;
  for (const BenchRatio& r : ratios) {
    EXPECT_TRUE(names.insert(r.name).second) << r.name;
    EXPECT_TRUE(std::isfinite(r.ratio) && r.ratio > 0) << r.name;
    EXPECT_LE(r.low, r.high) << r.name;
    EXPECT_EQ(r.rounds, 2);
    EXPECT_FALSE(r.goal) << r.name;  // goals apply to long sequences only
    EXPECT_NE(out.str().find(r.name.substr(r.name.find('/') + 1)), std::string::npos) << out.str();
  }
}

}  // namespace
}  // namespace annulus::patterns_test
