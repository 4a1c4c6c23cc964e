// Tests the layouts that `annulus bench layouts` compares, and the benchmark itself at a small size.
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "attention/plan/needs.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/dealt_layouts.h"
#include "comm/threads/threads.h"

namespace annulus::layouts_test {
namespace {

// The pairs before each position, if each of these chunks has its work in its first query.
std::vector<int64_t> chunks_of(const std::vector<int64_t>& work, int64_t chunk) {
  std::vector<int64_t> before = {0};
  for (const int64_t w : work) {
    for (int64_t i = 0; i < chunk; ++i) before.push_back(before.back() + (i == 0 ? w : 0));
  }
  return before;
}

std::vector<int64_t> sums(const Layout& layout, const std::vector<int64_t>& before) {
  std::vector<int64_t> all;
  for (const std::vector<Span>& spans : layout.spans) {
    all.push_back(0);
    for (const Span& s : spans) {
      all.back() += before[static_cast<size_t>(s.last() + 1)] - before[static_cast<size_t>(s.begin)];
    }
  }
  return all;
}

// The example in the docstring of ptrr_scheduling.
TEST(DealtLayouts, RoundRobinIsPyTorchs) {
  const auto before = chunks_of({9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10}, 128);
  EXPECT_EQ(sums(round_robin_layout(before, 4), before), (std::vector<int64_t>{45, 45, 43, 47}));
}

TEST(DealtLayouts, MinHeapGivesEachRankAsManyChunks) {
  const auto before = chunks_of({9, 1, 1, 1, 8, 1, 1, 2}, 64);
  const Layout layout = min_heap_layout(before, 2, 64);
  EXPECT_EQ(layout.count(0), 256);
  EXPECT_EQ(layout.count(1), 256);
  EXPECT_EQ(sums(layout, before), (std::vector<int64_t>{12, 12}));
}

TEST(DealtLayouts, NoEvenLayoutNeedsFewerRowsThanTheLeast) {
  std::mt19937_64 random(5);
  for (const std::string& mixture : length_mixtures()) {
    for (const int ranks : {4, 16}) {
      const std::vector<int64_t> lengths = draw_lengths(mixture, 16384, random);
      EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), 16384);
      const Pattern pattern = packed_row(lengths);
      const Layout layout = balanced_layout(pattern, ranks);
      EXPECT_LE(most_over_mean(layout, position_work(pattern).before), 1.05);
      Needs needs(pattern, layout, layout);
      EXPECT_GE(static_cast<double>(needs.foreign_rows()), least_rows(lengths, ranks)) << mixture << ", " << ranks;
    }
  }
  // Half of the pairs of a document over two ranks are those of its last 29 %: the keys before are sent once.
  EXPECT_NEAR(least_rows({10000}, 2), 10000 * 0.7, 400);
}

TEST(LayoutsBenchmark, CountsUnevenRows) {
  CLI::App app;
  const std::unique_ptr<Benchmark> benchmark = make_layouts_benchmark();
  benchmark->declare(app);
  app.parse("--ranks 4 --ranks 8 --length 16384 --batches 2");
  std::ostringstream out;
  run_ranks(1, [&](Communicator& world) { benchmark->run(world, out); });
  const std::string text = out.str();
  EXPECT_NE(text.find("12 rows: pairs above 1.05 of the mean in 0,"), std::string::npos) << text;
}

}  // namespace
}  // namespace annulus::layouts_test
