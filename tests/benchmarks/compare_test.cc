// Tests benchmarks/report.h: which changes of a ratio count as worse, and what the comparison prints.
#include "benchmarks/report.h"

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/common/expect_error.h"

namespace annulus::compare_test {
namespace {

BenchRatio ratio(const std::string& name, double value, double spread = 0, const std::string& settings = "s") {
  return {name, settings, value, value, value + spread, 5, std::nullopt};
}

BenchReport report(std::vector<BenchRatio> ratios) {
  return {{4, "AVX512"}, "0.1.0", "2026-11-21T21:40:00Z", std::move(ratios)};
}

struct Compared {
  std::vector<std::string> worse;
  std::string text;
};

Compared compare(const BenchReport& before, const BenchReport& after, double margin = 0.1) {
  std::ostringstream out;
  std::vector<std::string> worse = compare_reports(before, after, margin, out);
  return {std::move(worse), out.str()};
}

TEST(Judge, AllowsMarginAndLargerSpread) {
  // No spread: the margin alone.
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 1.09), 0.1), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 1.11), 0.1), Outcome::kWorse);
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 0.91), 0.1), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 0.89), 0.1), Outcome::kBetter);
  // The spread of either side is allowed too.
  EXPECT_EQ(judge(ratio("a", 1, 0.2), ratio("a", 1.25), 0.1), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 1.25, 0.2), 0.1), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 1, 0.2), ratio("a", 1.35, 0.1), 0.1), Outcome::kWorse);
  // The margin is a share of the old ratio.
  EXPECT_EQ(judge(ratio("a", 0.1), ratio("a", 0.15), 0.1), Outcome::kWorse);
  EXPECT_EQ(judge(ratio("a", 0.1), ratio("a", 0.15), 0.6), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 1), ratio("a", 1), 0), Outcome::kSame);
  EXPECT_EQ(judge(ratio("a", 0), ratio("a", 0.01), 0.1), Outcome::kWorse);
}

TEST(Compare, NamesWorseRatios) {
  const Compared c = compare(report({ratio("a", 1), ratio("b", 1), ratio("c", 1)}),
                             report({ratio("c", 2), ratio("a", 1.5), ratio("b", 0.5)}));
  EXPECT_EQ(c.worse, (std::vector<std::string>{"a", "c"}));
  EXPECT_NE(c.text.find("+50.0 %"), std::string::npos) << c.text;
  EXPECT_NE(c.text.find("-50.0 %"), std::string::npos) << c.text;
  EXPECT_NE(c.text.find("better"), std::string::npos) << c.text;
  EXPECT_EQ(c.text.find("machines differ"), std::string::npos) << c.text;
}

TEST(Compare, ReportEqualsItself) {
  const BenchReport one = report({ratio("a", 1, 0.3), ratio("b", 0)});
  EXPECT_TRUE(compare(one, one, 0).worse.empty());
}

TEST(Compare, NamesRatiosOfOneFileOnly) {
  const Compared c =
      compare(report({ratio("both", 1), ratio("gone", 1)}), report({ratio("both", 1), ratio("added", 1)}));
  EXPECT_TRUE(c.worse.empty());
  EXPECT_NE(c.text.find("only in the old file: gone\n"), std::string::npos) << c.text;
  EXPECT_NE(c.text.find("only in the new file: added\n"), std::string::npos) << c.text;
}

TEST(Compare, SkipsRatiosWithOtherSettings) {
  const Compared c = compare(report({ratio("a", 1, 0, "16384 tokens"), ratio("b", 1)}),
                             report({ratio("a", 9, 0, "256 tokens"), ratio("b", 1)}));
  EXPECT_TRUE(c.worse.empty());
  EXPECT_NE(c.text.find("not compared: a (old: 16384 tokens; new: 256 tokens)"), std::string::npos) << c.text;
}

TEST(Compare, SkipsInvalidRatios) {
  BenchRatio invalid = ratio("a", 9);
  invalid.invalid = "computed by another operator";
  const Compared c = compare(report({ratio("a", 1), ratio("b", 1)}), report({invalid, ratio("b", 1)}));
  EXPECT_TRUE(c.worse.empty());
  EXPECT_NE(c.text.find("invalid, not compared: a: computed by another operator"), std::string::npos) << c.text;
}

TEST(Compare, SaysThatMachinesDiffer) {
  BenchReport other = report({ratio("a", 1)});
  other.machine.isa = "AVX2";
  const Compared c = compare(report({ratio("a", 1)}), other);
  EXPECT_NE(c.text.find("The machines differ"), std::string::npos) << c.text;
  EXPECT_NE(c.text.find("4 cores, AVX2"), std::string::npos) << c.text;
}

TEST(Compare, RefusesReportsWithNothingInCommon) {
  for (const BenchReport& after : {report({}), report({ratio("b", 1)}), report({ratio("a", 1, 0, "other")})}) {
    std::ostringstream out;
    expect_error(ErrorKind::kInput, {}, [&] { compare_reports(report({ratio("a", 1)}), after, 0.1, out); });
  }
}

}  // namespace
}  // namespace annulus::compare_test
