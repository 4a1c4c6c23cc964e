// Tests that a run over threads names a rank that computes longer than the others, in its log and in metrics.jsonl.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/trainer.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::slow_ranks_test {
namespace {

// What a run of four ranks says of the second but last, which from step 8 to step 32 is busy with something else.
struct SlowRun {
  std::vector<nlohmann::json> named, over;
  std::string out;
};

SlowRun with_a_slow_rank(std::chrono::milliseconds busy, double seconds) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.run.steps = 64;
  config.run.slow_steps = 10;
  config.run.slow_seconds = seconds;
  std::ostringstream out;
  run_ranks(4, [&](Communicator& world) {
    int64_t calls = 0;
    TrainOptions options;
    options.out = &out;
    options.stop = [&] {
      ++calls;
      const auto until = std::chrono::steady_clock::now() + busy;
      while (world.rank() == 2 && calls >= 8 && calls < 32 && std::chrono::steady_clock::now() < until) continue;
      return false;
    };
    EXPECT_EQ(run_training(config, world, options), 0);
  });
  const std::string run = folder.path() + "/runs/tiny-001";
  return {metrics(run, "slow_rank"), metrics(run, "slow_rank_over"), out.str()};
}

// It is named after nine slow steps of ten, and no other is, although all wait for it. On a busy machine a step in
// which another rank was as slow does not count; which steps do is tested with given times (stragglers_test.cc).
TEST(SlowRanks, TheRankThatComputesLongerIsNamed) {
  const auto [named, over, out] = with_a_slow_rank(std::chrono::milliseconds(100), 0);
  ASSERT_EQ(named.size(), 1U) << out;
  EXPECT_EQ(named[0]["slow_rank"], 2);
  const int64_t since = named[0]["slow_since"], step = named[0]["step"];
  EXPECT_GE(since, 8);
  EXPECT_LT(step, since + 10);
  EXPECT_LT(step, 32);
  EXPECT_GT(named[0]["slow_share"], Config().run.slow_share);
  ASSERT_EQ(over.size(), 1U) << out;
  EXPECT_EQ(over[0]["slow_rank_over"], 2);
  EXPECT_GT(over[0]["step"], 32);
  const std::string text = "warning: rank 2 on " + named[0]["slow_host"].get<std::string>() + " computes ";
  EXPECT_NE(out.find(text), std::string::npos) << out;
  EXPECT_NE(out.find(" longer than the median since step " + std::to_string(since) + "; "), std::string::npos) << out;
}

// Twenty-four slow steps of 20 ms or a little more are too short a time. (The other 40 cannot make up for them: nine
// tenths of it must be slow.)
TEST(SlowRanks, NobodyIsNamedForAShortTime) {
  const auto [named, over, out] = with_a_slow_rank(std::chrono::milliseconds(20), 60);
  EXPECT_EQ(named.size() + over.size(), 0U) << out;
}

}  // namespace
}  // namespace annulus::slow_ranks_test
