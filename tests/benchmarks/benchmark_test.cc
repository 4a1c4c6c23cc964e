// Tests benchmarks/benchmark.h: what an option's help says is what it does.
#include "benchmarks/benchmark.h"

#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "benchmarks/measure.h"

namespace annulus::benchmark_test {
namespace {

struct Options {
  int64_t length = 16384;
  int threads = 1;
  double seconds = 0.5;
  std::string layout = "zigzag", file;
  std::vector<int64_t> lengths = {512, 8192};
  std::vector<std::string> parts;

  explicit Options(CLI::App& app) {
    add(app, "--length", length, "tokens");
    add(app, "--threads", threads, "threads");
    add(app, "--seconds", seconds, "seconds");
    add(app, "--layout", layout, "layout");
    add(app, "--file", file, "file");
    add(app, "--lengths", lengths, "tokens");
    add(app, "--part", parts, "part");
  }
};

TEST(Options, HelpShowsTheDefaultsThatAreUsed) {
  CLI::App app;
  const Options options(app);
  const std::string help = app.help();
  for (const char* const text :
       {"tokens (default: 16384)", "threads (default: 1)", "seconds (default: 0.5)", "layout (default: zigzag)",
        "tokens; may be given several times (default: 512 and 8192)"}) {
    EXPECT_NE(help.find(text), std::string::npos) << text << help;
  }
  EXPECT_EQ(help.find("(default: )"), std::string::npos) << help;
}

TEST(Options, ListsAreReplacedAndNumbersMustBePositive) {
  CLI::App app;
  const Options options(app);
  app.parse("--lengths 3 --lengths 4 --part a --part b --threads 2");
  EXPECT_EQ(options.lengths, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(options.parts, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(options.threads, 2);
  for (const char* const wrong : {"--length 0", "--threads -1", "--seconds 0", "--lengths 0"}) {
    EXPECT_THROW(app.parse(wrong), CLI::ParseError) << wrong;
  }
}

TEST(Benchmarks, DeclareTheirOptionsAndAnExample) {
  for (auto* const make : {make_attention_benchmark, make_comm_benchmark, make_counts_benchmark, make_layouts_benchmark,
                           make_operator_benchmark, make_patterns_benchmark, make_ring_benchmark, make_seeds_benchmark,
                           make_shard_benchmark, make_train_benchmark}) {
    CLI::App app;
    app.add_option("--json");  // which bench declares for all of them
    make()->declare(app);
    EXPECT_NE(app.get_footer().find("./annulus bench "), std::string::npos) << app.help();
  }
}

TEST(Line, FormatsNumbersAndTextsOfAllTypes) {
  EXPECT_EQ(
      line("%lld %lld %lld %s %s %.2f %-*s|", 1, int64_t{-2}, size_t{3}, "a", std::string("b"), 0.5, Width{4}, "c"),
      "1 -2 3 a b 0.50 c   |");
  EXPECT_EQ(line("%s", std::string(2000, 'x')).size(), 2000u);
}

}  // namespace
}  // namespace annulus::benchmark_test
