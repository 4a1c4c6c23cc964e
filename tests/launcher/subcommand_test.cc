// Tests how the options of any subcommand are parsed: numbers exactly as typed, or with an error, and no empty
// arguments.
#include "launcher/subcommand.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"

namespace annulus {
namespace {

// The values of an option of each type, and of an option of a subcommand.
struct Numbers {
  int64_t any = 0;
  int64_t positive = 1;
  int small = 0;
  uint64_t seed = 0;
  double real = 0;
  std::optional<double> share;
  std::vector<int64_t> list;
  std::string text, maybe, file;
  bool flag = false;
  int inner = 0;
} numbers;

class NumbersSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    numbers = {};
    app.add_option("--any", numbers.any);
    app.add_option("--positive", numbers.positive)->check(CLI::PositiveNumber);
    app.add_option("--small", numbers.small)->check(CLI::NonNegativeNumber);
    app.add_option("--seed", numbers.seed);
    app.add_option("--real", numbers.real);
    app.add_option("--share", numbers.share)->check(CLI::PositiveNumber);
    app.add_option("--list", numbers.list)->delimiter(',');
    app.add_option("--text", numbers.text);
    app.add_option("--maybe", numbers.maybe)->expected(0, 1);
    app.add_flag("--flag", numbers.flag);
    app.add_option("FILE", numbers.file);
    app.add_subcommand("word")->add_option("--inner", numbers.inner)->check(CLI::Range(0, 9));
  }
  int run() override { return 0; }
};

const SubcommandEntry kEntry = {"numbers", "", false,
                                [] { return std::unique_ptr<Subcommand>(new NumbersSubcommand); }};

const SubcommandEntry kRanksEntry = {"numbers", "", true, kEntry.make};

std::string refusal(const std::vector<std::string>& args, const SubcommandEntry& entry = kEntry) {
  try {
    parse_subcommand(entry, args);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUsage) << e.what();
    return e.what();
  }
  return "";
}

TEST(ParseSubcommand, ParsesNumbersOverTheirWholeRange) {
  EXPECT_EQ(
      refusal({"--any", "-9223372036854775808", "--positive", "9223372036854775807", "--small", "2147483647", "--seed",
               "18446744073709551615", "--real", "-1.5e-3", "--share", "0.1", "--list", "3,-5,0", "--text", "010"}),
      "");
  EXPECT_EQ(numbers.any, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(numbers.positive, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(numbers.small, std::numeric_limits<int>::max());
  EXPECT_EQ(numbers.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(numbers.real, -1.5e-3);
  EXPECT_EQ(numbers.share, 0.1);
  EXPECT_EQ(numbers.list, (std::vector<int64_t>{3, -5, 0}));
  EXPECT_EQ(numbers.text, "010");
  EXPECT_EQ(refusal({"word", "--inner", "7"}), "");
  EXPECT_EQ(numbers.inner, 7);
}

TEST(ParseSubcommand, RefusesMalformedNumbers) {
  const std::string limit = "9223372036854775807";
  for (const std::vector<std::string>& row : std::vector<std::vector<std::string>>{
           {"--seed", "-1", "expected a whole number of at least 0, got \"-1\""},
           {"--seed", "18446744073709551616", ", and the largest is 18446744073709551615"},
           {"--any", "9223372036854775808",
            "expected a whole number, got \"9223372036854775808\", and the largest is " + limit},
           {"--any", "-9223372036854775809", "expected a whole number, got \"-9223372036854775809\""},
           {"--any", "010", "expected a whole number, got \"010\""},
           {"--any", "-010", "expected a whole number, got \"-010\""},
           {"--any", "0x10", "expected a whole number, got \"0x10\""},
           {"--any", "1.0", "expected a whole number, got \"1.0\""},
           {"--any", "3x", "expected a whole number, got \"3x\""},
           {"--positive", "0", "expected a whole number of at least 1, got \"0\""},
           {"--positive", "99999999999999999999", ", and the largest is " + limit},
           {"--small", "-1", "expected a whole number of at least 0, got \"-1\""},
           {"--small", "2147483648", "2147483648"},
           {"--real", "nan", "expected a finite number, got \"nan\""},
           {"--real", "inf", "expected a finite number, got \"inf\""},
           {"--real", "1e400", "expected a finite number, got \"1e400\""},
           {"--real", "0.1x", "expected a finite number, got \"0.1x\""},
           {"--share", "0", "expected a finite number above 0, got \"0\""},
           {"--list", "3,5x", "expected a whole number, got \"5x\""},
       }) {
    const std::string& option = row[0];
    const std::string text = refusal({option, row[1]});
    EXPECT_EQ(text.find("[launcher] numbers: "), 0) << text;
    EXPECT_NE(text.find(option), std::string::npos) << text;
    EXPECT_NE(text.find(row[2]), std::string::npos) << text;
    EXPECT_LT(text.size(), 200) << text;
  }
  EXPECT_NE(refusal({"word", "--inner", "07"}).find("numbers word: --inner: expected a whole number, got \"07\""),
            std::string::npos);
  EXPECT_NE(refusal({"word", "--inner", "10"}).find("--inner"), std::string::npos);
}

// "$UNSET" in a shell is an empty argument. It is no value, whatever the option would do with it.
TEST(ParseSubcommand, RefusesEmptyArguments) {
  const std::string empty = " is empty: give it a value, or leave it out";
  for (const auto& [args, named] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--text", ""}, "--text"},
           {{"--text="}, "--text"},
           {{"--any", ""}, "--any"},
           {{"--list", ""}, "--list"},
           {{"--maybe", ""}, "--maybe"},
           {{"--maybe="}, "--maybe"},
           {{"--flag", ""}, "argument 2"},
           {{""}, "argument 1"},
           {{"file", "", "--any", "3"}, "argument 2"},
           {{"--text=a", ""}, "argument 2"},
           {{"word", "--inner", ""}, "--inner"},
           {{"word", "--inner="}, "--inner"},
           {{"word", ""}, "argument 2"},
       }) {
    EXPECT_NE(refusal(args).find("numbers: " + named + empty), std::string::npos) << named << ": " << refusal(args);
  }
  EXPECT_EQ(refusal({"--text", " ", "--maybe"}), "");
  EXPECT_EQ(refusal({"--text", "--no-option="}), "");
  EXPECT_EQ(numbers.text, "--no-option=");
  EXPECT_EQ(refusal({"--text", "a="}), "");
  EXPECT_EQ(numbers.text, "a=");
}

TEST(ParseSubcommand, RankCountOptionPointsToLaunch) {
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"-n", "3"}, {"-n3"}, {"-np", "3"}, {"--np", "3"}, {"--np=3"}, {"--any", "7", "-n", "3"}}) {
    const std::string words = "ranks are started by `", command = " launch -n 3 numbers ...`";
    const std::string text = refusal(args, kRanksEntry);
    EXPECT_NE(text.find(words), std::string::npos) << text;
    EXPECT_NE(text.find(command), std::string::npos) << text;
    EXPECT_EQ(refusal(args).find("started by"), std::string::npos) << "this subcommand does not run as ranks";
  }
  EXPECT_NE(refusal({"word", "-n", "3"}, kRanksEntry).find(" launch -n 3 numbers word ...`"), std::string::npos);
  EXPECT_NE(refusal({"--any", "7", "-n"}, kRanksEntry).find(" launch -n N numbers ...`"), std::string::npos);
  EXPECT_NE(refusal({"-n", "--any"}, kRanksEntry).find("--any"), std::string::npos);
  EXPECT_EQ(refusal({"-nx"}, kRanksEntry).find("started by"), std::string::npos);
}

}  // namespace

const std::vector<SubcommandEntry>& subcommands() {
  static const std::vector<SubcommandEntry> table;
  return table;
}

}  // namespace annulus
