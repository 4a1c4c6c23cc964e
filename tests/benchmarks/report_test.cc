// Tests benchmarks/report.h: ratios of measurements, and reports that are written to files and read back.
#include "benchmarks/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "common/error.h"
#include "common/simd/instruction_set.h"
#include "common/version.h"
#include "tests/common/expect_error.h"

namespace annulus::report_test {
namespace {

std::string file(const char* name) { return ::testing::TempDir() + "/" + std::to_string(getpid()) + name; }

// Returns the message of the error that reading `json` throws, or "".
std::string refusal(const std::string& json) {
  try {
    parse_report(json, "F.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "";
}

std::string with_ratios(const std::string& ratios) {
  return R"({"format": "annulus-bench-1", "version": "0.1.0", "date": "2026-11-21T21:40:00Z",)"
         R"( "machine": {"cores": 4, "isa": "AVX512"}, "ratios": [)" +
         ratios + "]}";
}

TEST(BenchRatio, IsRatioOfMinimaWithQuartiles) {
  // Ratios of the rounds: 2, 3, 4, 6, 1.
  const BenchRatio r = ratio_of("a", "s", {2, 6, 4, 12, 3}, {1, 2, 1, 2, 3}, 2.5);
  EXPECT_DOUBLE_EQ(r.ratio, 2);
  EXPECT_DOUBLE_EQ(r.low, 2);
  EXPECT_DOUBLE_EQ(r.high, 4);
  EXPECT_EQ(r.rounds, 5);
  EXPECT_TRUE(r.met());
  EXPECT_FALSE(ratio_of("a", "s", {3}, {1}, 2.5).met());
  EXPECT_TRUE(ratio_of("a", "s", {3}, {1}).met());
}

TEST(BenchRatio, OneRoundHasNoSpread) {
  const BenchRatio r = ratio_of("a", "s", {3}, {2});
  EXPECT_DOUBLE_EQ(r.low, 1.5);
  EXPECT_DOUBLE_EQ(r.high, 1.5);
}

TEST(BenchRatio, AnInvalidOneMeetsNoGoal) {
  BenchRatio r = ratio_of("a", "s", {3}, {2}, 2.0);
  EXPECT_TRUE(r.met());
  r.invalid = "another operator";
  EXPECT_FALSE(r.met());
  const std::string path = file("invalid.json");
  write_report(report_of({r, ratio_of("b", "s", {3}, {2})}), path);
  const BenchReport read = read_report(path);
  EXPECT_EQ(read.ratios[0].invalid, "another operator");
  EXPECT_EQ(read.ratios[1].invalid, "");
}

TEST(BenchReport, RoundTripsThroughItsFile) {
  const std::string path = file("report.json");
  const BenchReport written =
      report_of({ratio_of("ring/2 ranks", "8 tokens", {3, 4}, {2, 3}, 1.05), ratio_of("odd \"name\"", "", {1}, {3})});
  write_report(written, path);
  const BenchReport read = read_report(path);
  EXPECT_EQ(read.version, kVersion);
  EXPECT_EQ(read.date, written.date);
  EXPECT_EQ(read.machine, written.machine);
  EXPECT_GE(read.machine.cores, 1);
  EXPECT_EQ(read.machine.isa, instruction_set_name(instruction_set()));
  ASSERT_EQ(read.ratios.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(read.ratios[i].name, written.ratios[i].name);
    EXPECT_EQ(read.ratios[i].settings, written.ratios[i].settings);
    EXPECT_EQ(read.ratios[i].ratio, written.ratios[i].ratio);  // to the bit
    EXPECT_EQ(read.ratios[i].low, written.ratios[i].low);
    EXPECT_EQ(read.ratios[i].high, written.ratios[i].high);
    EXPECT_EQ(read.ratios[i].rounds, written.ratios[i].rounds);
    EXPECT_EQ(read.ratios[i].goal, written.ratios[i].goal);
  }
}

TEST(BenchReport, RefusesMalformedReportsAndNamesThePlace) {
  const std::string good = R"({"name": "a", "settings": "", "ratio": 1, "low": 1, "high": 2, "rounds": 3})";
  EXPECT_EQ(refusal(with_ratios(good)), "");
  EXPECT_NE(refusal("").find("F.json: this is not JSON"), std::string::npos);
  EXPECT_NE(refusal("{\"format\": ").find("not JSON"), std::string::npos);
  EXPECT_NE(refusal("{\"format\": 1e999}").find("F.json: a number in it is too large"), std::string::npos);
  EXPECT_NE(refusal("[1]").find("is not an object"), std::string::npos);
  EXPECT_NE(refusal("{}").find("has no \"format\""), std::string::npos);
  EXPECT_NE(refusal(R"({"format": "other"})").find("its format is \"other\""), std::string::npos);
  EXPECT_NE(refusal(R"({"format": "annulus-bench-1", "version": 1})").find("\"version\""), std::string::npos);
  EXPECT_NE(refusal(with_ratios("7")).find("ratio 1 is not an object"), std::string::npos);
  EXPECT_NE(refusal(with_ratios(good + "," + good)).find("\"a\" occurs twice"), std::string::npos);
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"ratio", "-1"}, {"ratio", "\"1\""}, {"ratio", "1e999"}, {"low", "3"}, {"rounds", "0"}, {"rounds", "1.5"}}) {
    std::string bad = good;
    const size_t at = bad.find("\"" + key + "\": ") + key.size() + 4;
    bad.replace(at, 1, value);
    EXPECT_NE(refusal(with_ratios(bad)), "") << key << " " << value;
  }
  for (const char* key : {"name", "settings", "ratio", "low", "high", "rounds"}) {
    std::string bad = good;
    bad.replace(bad.find(key), std::string(key).size(), "other");
    EXPECT_NE(refusal(with_ratios(bad)).find("has no \"" + std::string(key) + "\""), std::string::npos) << key;
  }
}

TEST(BenchReport, RefusesMissingFileAndFolder) {
  for (const std::string& path : {file("missing.json"), ::testing::TempDir()}) {
    expect_error(ErrorKind::kInput, {path}, [&] { read_report(path); });
  }
}

}  // namespace
}  // namespace annulus::report_test
