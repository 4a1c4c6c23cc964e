// Tests benchmarks/report.h and kept.h: which changes of a ratio count as worse, what comparisons print, and the files
// of kept ratios.
#include "benchmarks/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/kept.h"
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

Compared beside(const std::optional<BenchReport>& kept, const BenchReport& now, std::optional<double> fail_above = {}) {
  std::ostringstream out;
  std::vector<std::string> above = compare_with_kept(kept, now, fail_above, out);
  return {std::move(above), out.str()};
}

TEST(Kept, StandsBesideEachRatioWithTheChange) {
  const BenchReport kept = report({ratio("a", 0.8), ratio("b", 1), ratio("other", 1, 0, "16 tokens")});
  const BenchReport now =
      report({ratio("a", 1), ratio("b", 1.05), ratio("other", 1, 0, "32 tokens"), ratio("added", 2)});
  const Compared c = beside(kept, now);
  EXPECT_TRUE(c.worse.empty()) << "nothing fails unless it is asked for";
  for (const char* const row : {"  a         0.800     1.000    +25.0 %\n", "  b         1.000     1.050     +5.0 %\n",
                                "none is kept at these settings (kept: 16 tokens; now: 32 tokens)\n",
                                "  added         -     2.000             none is kept for AVX512\n"}) {
    EXPECT_NE(c.text.find(row), std::string::npos) << row << "\nin: " << c.text;
  }
  EXPECT_EQ(beside(kept, now, 1.1).worse, std::vector<std::string>{"a"});
  EXPECT_TRUE(beside(kept, now, 1.3).worse.empty());
}

TEST(Kept, SaysWhereNothingIsKept) {
  const BenchReport now = report({ratio("a", 1)});
  EXPECT_EQ(beside({}, now).text, "no ratios are kept for AVX512\n");
  // What cannot be held is no success.
  std::ostringstream out;
  for (const std::optional<BenchReport>& kept : {std::optional<BenchReport>(), {report({ratio("b", 1)})}}) {
    expect_error(ErrorKind::kInput, {"--fail-above", "AVX512"}, [&] { compare_with_kept(kept, now, 1.1, out); });
  }
  BenchRatio invalid = ratio("a", 1);
  invalid.invalid = "computed by another operator";
  EXPECT_NE(beside(now, report({invalid})).text.find("invalid: computed by another"), std::string::npos);
  EXPECT_NE(beside(report({invalid}), now).text.find("the kept one is invalid"), std::string::npos);
}

TEST(Kept, HasAFileForEachInstructionSet) {
  const std::string folder = ::testing::TempDir();
  EXPECT_EQ(kept_path("f", "AVX-512 BF16"), "f/ratios-avx-512-bf16.json");
  EXPECT_EQ(kept_path("f", "../../x"), "f/ratios-------x.json");
  BenchReport avx = report({ratio("a", 1)});
  avx.machine.isa = "AVX-512";
  EXPECT_FALSE(read_kept(folder, "AMX"));
  write_report(avx, kept_path(folder, "AVX-512"));
  EXPECT_EQ(read_kept(folder, "AVX-512")->ratios.size(), 1u);
  write_report(avx, kept_path(folder, "AVX2"));
  expect_error(ErrorKind::kInput, {"ratios-avx2.json", "AVX2", "AVX-512"}, [&] { read_kept(folder, "AVX2"); });
}

TEST(Kept, FilesOfTheRepositoryCanBeRead) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("benchmarks/results")) {
    const std::string path = entry.path().string();
    if (!entry.path().filename().string().starts_with("ratios-")) continue;
    ++files;
    const BenchReport kept = read_report(path);
    EXPECT_EQ(kept_path("benchmarks/results", kept.machine.isa), path);
    for (const BenchRatio& r : kept.ratios) EXPECT_TRUE(r.invalid.empty()) << path << ": " << r.name;
  }
  EXPECT_GE(files, 1);
}

}  // namespace
}  // namespace annulus::compare_test
