// Tests that ranks notice bits of the weights and gradients that only one of them holds.
#include "runtime/training/state/copies.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/training.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::copies_test {
namespace {

using Digests = std::vector<std::vector<uint64_t>>;

TEST(FindUnequal, NamesTheOddOneOfThreeAndBothOfTwo) {
  const std::vector<std::string> parts = {"a", "b"};
  EXPECT_FALSE(find_unequal(parts, {{1, 2}, {1, 2}, {1, 2}}));
  const auto odd = find_unequal(parts, {{1, 2}, {1, 2}, {1, 9}});
  ASSERT_TRUE(odd);
  EXPECT_EQ(odd->what, "b");
  EXPECT_EQ(odd->ranks, std::vector<int>{2});
  EXPECT_TRUE(odd->majority);
  EXPECT_EQ(odd->parts, 1);
  const auto both = find_unequal(parts, {{1, 2}, {3, 4}});
  ASSERT_TRUE(both);
  EXPECT_EQ(both->ranks, (std::vector<int>{0, 1}));
  EXPECT_FALSE(both->majority);
  EXPECT_EQ(both->parts, 2);
}

TEST(FindUnequal, NamesAllOfTwoEqualGroups) {
  const auto half = find_unequal({"a"}, {{1}, {2}, {1}, {2}});
  ASSERT_TRUE(half);
  EXPECT_EQ(half->ranks.size(), 4u);
  EXPECT_FALSE(half->majority);
  EXPECT_EQ(find_unequal({"a"}, {{1}, {2}, {1}, {3}})->ranks, (std::vector<int>{1, 3}));
  EXPECT_EQ(find_unequal({"a"}, {{1}, {2}, {3}})->ranks.size(), 3u);
}

Config config_of(const TestFolder& folder, int shard, int64_t every) {
  Config config = tiny_config(folder);
  config.data.context = 60;  // for three ranks
  config.optimizer.shard = shard;
  config.run.compare_copies = every;
  config.run.steps = 100;
  config.checkpoint.every = 0;
  return config;
}

// Flips the lowest bit of one weight of the first layer.
void flip_weight(Training& training) {
  const at::Tensor weights = training.model().parameters().values(1).tensor();
  auto* const word = static_cast<uint8_t*>(weights.mutable_data_ptr()) + 4 * 17;
  *word ^= 1;
}

// Trains up to 8 steps on `ranks` ranks and flips a bit on the last of them after the second. Returns the error of each
// rank, and in `steps` how many steps were done.
std::vector<std::string> errors_of(const Config& config, int ranks, int64_t& steps, bool flips = true) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    try {
      while (training.steps_done() < 8) {
        training.step();
        if (flips && training.steps_done() == 2 && world.rank() == ranks - 1) flip_weight(training);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kResource);
      errors[static_cast<size_t>(world.rank())] = error.message();
    }
    if (world.rank() == 0) steps = training.steps_done();
  });
  return errors;
}

TEST(CompareCopies, OfThreeCopiesTheOddOneIsNamed) {
  TestFolder folder;
  int64_t steps = 0;
  const std::vector<std::string> errors = errors_of(config_of(folder, 0, 4), 3, steps);
  EXPECT_EQ(steps, 3) << "found in step 4";
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_EQ(error.find("step 4: the weights of "), 0u) << error;
    EXPECT_NE(error.find("but rank 2 (host "), std::string::npos) << error;
    EXPECT_NE(error.find(") holds others than the other 2 ranks"), std::string::npos) << error;
  }
}

TEST(CompareCopies, SoundCopiesAreEqualAtEachLevel) {
  for (const int shard : {0, 1, 2}) {
    TestFolder folder;
    int64_t steps = 0;
    EXPECT_EQ(errors_of(config_of(folder, shard, 1), 3, steps, /*flips=*/false)[0], "");
    EXPECT_EQ(steps, 8);
  }
}

TEST(CompareCopies, OfTwoCopiesBothAreNamed) {
  TestFolder folder;
  int64_t steps = 0;
  for (const std::string& error : errors_of(config_of(folder, 0, 3), 2, steps)) {
    EXPECT_NE(error.find("but rank 0 (host "), std::string::npos) << error;
    EXPECT_NE(error.find(", rank 1 (host "), std::string::npos) << error;
    EXPECT_NE(error.find("do not tell which are right"), std::string::npos) << error;
  }
  EXPECT_EQ(steps, 2);
}

TEST(CompareCopies, ComparesBeforeACheckpointAndNotUnlessAsked) {
  TestFolder folder;
  int64_t steps = 0;
  Config config = config_of(folder, 0, 1000);
  config.checkpoint.every = 5;
  EXPECT_NE(errors_of(config, 3, steps)[0], "");
  EXPECT_EQ(steps, 4);
  config.run.compare_copies = 0;
  EXPECT_EQ(errors_of(config, 3, steps)[0], "");
  EXPECT_EQ(steps, 8);
}

TEST(CompareCopies, GradientsAreComparedWhereTheyAreWhole) {
  TestFolder folder;
  const Config config = config_of(folder, 0, 0);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(3, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    training.step();
    auto& state = const_cast<ModelState&>(training.model_state());
    EXPECT_NO_THROW(require_equal_copies(world, state.digests(), 1));
    if (world.rank() == 1) *static_cast<uint8_t*>(state.updated()[0].gradients.mutable_data_ptr()) ^= 1;
    try {
      require_equal_copies(world, state.digests(), 1);
      ADD_FAILURE() << "not noticed";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.message()).find("the gradients of "), std::string::npos) << error.message();
      EXPECT_NE(std::string(error.message()).find("but rank 1 (host "), std::string::npos) << error.message();
    }
  });
}

TEST(CompareCopies, ShardedWeightsAreComparedAsTheyWereUsed) {
  for (const int shard : {1, 2}) {
    TestFolder folder;
    const Config config = config_of(folder, shard, 0);
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    run_ranks(3, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      auto& state = const_cast<ModelState&>(training.model_state());
      const size_t parts = state.digests().size();
      EXPECT_EQ(parts, training.model().parameters().units().size()) << "weights alone";
      if (world.rank() == 0) flip_weight(training);
      try {
        require_equal_copies(world, state.digests(), 1);
        ADD_FAILURE() << "not noticed";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.message()).find("but rank 0 (host "), std::string::npos) << error.message();
      }
    });
  }
}

TEST(CompareCopies, IsRefusedWhereThereAreNoCopies) {
  TestFolder folder;
  try {
    check_training(config_of(folder, 3, 10), 2);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    EXPECT_NE(std::string(error.message()).find("run.compare_copies"), std::string::npos);
  }
}

}  // namespace
}  // namespace annulus::copies_test
