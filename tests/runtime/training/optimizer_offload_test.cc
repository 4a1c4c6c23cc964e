// Tests that optimizer.offload changes no bit of a training or of its checkpoints, and what is refused.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/tiers/transfers.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"
#include "runtime/training/training_charges.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::optimizer_offload_test {
namespace {

// Less than a unit of the tiny models, so that each has several chunks.
constexpr int64_t kSmallChunk = 1024;

struct Curve {
  std::vector<double> numbers;  // losses, norms and the loss of a validation
  std::string digest;           // of the weights

  friend bool operator==(const Curve&, const Curve&) = default;
};

Curve go_on(Training& training, int64_t steps) {
  Curve curve;
  for (int64_t i = 0; i < steps; ++i) {
    const StepResult r = training.step();
    curve.numbers.insert(curve.numbers.end(), {r.loss, r.gradient_norm});
  }
  curve.numbers.push_back(training.validate([] { return false; }).loss);
  curve.digest = training.weights_digest();
  return curve;
}

// Runs `run` on every rank and returns the result of rank 0; all ranks see the same.
template <typename Run>
Curve of_rank_0(const Config& config, int ranks, const Run& run) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  Curve curve;
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU, kSmallChunk);
    const Curve mine = run(training, world);
    EXPECT_EQ(training.offloaded().has_value(), config.optimizer.offload != "none");
    if (world.rank() == 0) curve = mine;
  });
  return curve;
}

Config config_in(const TestFolder& folder) {
  Config config = tiny_config(folder);
  config.memory.files = folder.path();
  // A range of rates that begins within a unit and within a chunk.
  config.optimizer.groups.list = {{.match = "*.up_proj.weight", .lr = 0.5, .weight_decay = 0.2}};
  return config;
}

Config offloaded(Config config) {
  config.optimizer.offload = "file";
  return config;
}

// Whatever is sharded, accumulated or computed in, losses, norms, weights and moments have the same bits.
TEST(OptimizerOffload, ChangesNoBits) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    for (const int64_t level : {0, 1, 2, 3}) {
      for (const int ranks : {1, 2, 4}) {
        if (level > 0 && ranks == 1) continue;  // a shard is all there is
        Config config = config_in(folder);
        config.model.dtype = dtype;
        config.optimizer.shard = level;
        config.data.accumulate = (level + ranks) % 3 == 0 ? 2 : 1;
        config.model.tie_embeddings = level % 2 == 1;
        KeptState kept, kept_in_tier;
        const auto three_steps = [&](KeptState& into) {
          return [&](Training& training, Communicator& world) {
            const Curve curve = go_on(training, 3);
            keep_together(into, training, world);
            return curve;
          };
        };
        const Curve without = of_rank_0(config, ranks, three_steps(kept));
        const Curve with = of_rank_0(offloaded(config), ranks, three_steps(kept_in_tier));
        const std::string what = dtype + ", level " + std::to_string(level) + ", " + std::to_string(ranks) + " ranks";
        EXPECT_EQ(with.numbers, without.numbers) << what;
        EXPECT_EQ(with.digest, without.digest) << what;
        ASSERT_EQ(kept_in_tier.tensors.size(), kept.tensors.size()) << what;
        for (const auto& [name, tensor] : kept.tensors) {
          EXPECT_TRUE(kept_in_tier.tensors.at(name).equal(tensor)) << name << ", " << what;
        }
      }
    }
  }
}

// With layers offloaded as well, steps accumulated, and shards within hosts.
TEST(OptimizerOffload, GoesWithOtherSettings) {
  const TestFolder folder;
  Config config = config_in(folder);
  config.model.dtype = "bf16";
  config.model.layers = 4;
  config.model.recompute = true;
  config.memory.offload = "file";
  config.data.accumulate = 2;
  config.mesh.data = 2;
  config.optimizer.shard = 3;
  const auto steps = [](Training& training, Communicator&) { return go_on(training, 3); };
  Config both = offloaded(config);
  config.memory.offload = "none";
  EXPECT_EQ(of_rank_0(both, 4, steps), of_rank_0(config, 4, steps));
}

// A run may be resumed with the other setting, at another level, and goes back to an earlier state of its own.
TEST(OptimizerOffload, ResumesFromOneSettingToTheOther) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16"}) {
    Config config = config_in(folder);
    config.model.dtype = dtype;
    for (const int64_t level : {0, 2, 3}) {
      config.optimizer.shard = level;
      KeptState kept;
      const auto four_steps = [&](Training& training, Communicator& world) {
        go_on(training, 2);
        keep_together(kept, training, world);
        const Curve later = go_on(training, 2);
        kept.restore(training);
        EXPECT_EQ(go_on(training, 2), later) << "after a return";
        return later;
      };
      const auto resumed = [&](Training& training, Communicator&) {
        kept.restore(training);
        return go_on(training, 2);
      };
      for (const bool offloads : {false, true}) {
        const Config first = offloads ? offloaded(config) : config;
        Config second = offloads ? config : offloaded(config);
        const Curve later = of_rank_0(first, 2, four_steps);
        EXPECT_EQ(of_rank_0(second, 2, resumed), later) << dtype << ", level " << level;
        second.optimizer.shard = 3 - level;
        EXPECT_EQ(of_rank_0(second, 2, resumed), later) << dtype << ", from level " << level;
      }
    }
  }
}

// Weights that replace those of the seed, as those of an imported model, are those that are computed with.
TEST(OptimizerOffload, BeginsWithOtherWeights) {
  const TestFolder folder;
  Config config = config_in(folder);
  config.model.dtype = "bf16";
  const auto halved = [](const std::vector<TensorSlice>& into) {
    for (const TensorSlice& slice : into) {
      const PlacedVector part = slice.elements();
      part.write(0, part.read(0, part.numel()).mul(0.5));
    }
  };
  for (const int64_t level : {0, 1, 3}) {
    config.optimizer.shard = level;
    const auto begun = [&](Training& training, Communicator&) {
      const std::string seeded = training.weights_digest();
      training.begin_with(halved);
      EXPECT_NE(training.weights_digest(), seeded);
      return go_on(training, 2);
    };
    EXPECT_EQ(of_rank_0(offloaded(config), 2, begun), of_rank_0(config, 2, begun)) << level;
  }
}

TEST(OptimizerOffload, MovesItsStateOnceInAStep) {
  const TestFolder folder;
  Config config = offloaded(config_in(folder));
  config.model.dtype = "bf16";
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU, kSmallChunk);
    const MemoryPlan plan = plan_memory(config, check_training(config, 2), make_sharding(config, 2, 2), 2, world.rank(),
                                        RanksAre::kThreads);
    EXPECT_EQ(training.offloaded()->bytes_out, 0);
    for (int64_t i = 1; i <= 2; ++i) {
      training.step();
      EXPECT_EQ(training.offloaded()->bytes_out, i * plan.state.moved);
      EXPECT_EQ(training.offloaded()->bytes_back, i * plan.state.moved);
    }
  });
}

TEST(OptimizerOffload, RefusesWhatCannotBe) {
  const TestFolder folder;
  Config config = config_in(folder);
  config.optimizer.offload = "host";
  expect_error(ErrorKind::kUsage, {"optimizer.offload = \"host\"", "\"cpu\"", "use optimizer.offload = \"file\""},
               [&] { check_training(config, 1); });
  config.device = "auto";
  const auto nothing = [](Training&, Communicator&) { return Curve{}; };
  expect_error(ErrorKind::kUsage, {"this rank computes on a CPU"}, [&] { of_rank_0(config, 1, nothing); });
  config.optimizer.offload = "file";
  config.memory.files = folder.path() + "/missing";
  expect_error(ErrorKind::kResource, {"optimizer.offload: cannot make a file in " + config.memory.files},
               [&] { of_rank_0(config, 2, nothing); });
}

// Steps whose optimizer is offloaded are not recorded.
TEST(OptimizerOffload, IsNotRecorded) {
  const TestFolder folder;
  Config config = config_in(folder);
  const std::vector<Stage> stages = check_training(config, 1);
  EXPECT_TRUE(may_be_recorded(config, stages[0], {}, 1));
  EXPECT_FALSE(may_be_recorded(offloaded(config), stages[0], {}, 1));
}

TEST(OptimizerOffload, PlansWhereItsStateLies) {
  const TestFolder folder;
  Config config = config_in(folder);
  MemoryPlan memory;
  memory.state = {.moved = 900, .in_file = 1000, .pinned = 1200, .buffers = 30};
  config.optimizer.offload = "file";
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kProcesses).files, 2000);
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kProcesses).host, 0);
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kGpus).host, 60 + 2 * Transfers::kHeld) << "between both";
  config.optimizer.offload = "host";
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kGpus).host, 2400);
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kGpus).files, 0);
  // What layers keep gets what the optimizer leaves of memory.host.
  config.memory.offload = "host";
  config.model.layers = 5;
  memory.offloaded = 600, memory.offloaded_pinned = 800;
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kGpus).host, 2400 + 1600);
  config.memory.host = "3200B";
  const OffloadPlan half = plan_offload(config, memory, 2, RanksAre::kGpus);
  EXPECT_EQ(half.host, 3200 + 2 * (2 * 800 / 3) + 2 * Transfers::kHeld);
  EXPECT_EQ(half.files, 600 + 2 * 201);
  EXPECT_EQ(half.optimizer_host, 2400);
}

TEST(OptimizerOffload, RefusesMoreThanThereIs) {
  const TestFolder folder;
  Config config = offloaded(config_in(folder));
  const auto nearest = [] { return std::string("something fits"); };
  require_offload(config, {.files = 1 << 20, .optimizer_files = 1 << 20}, 2, nearest);
  constexpr int64_t kMuch = 2'000'000'000'000'000'000;
  expect_error(ErrorKind::kResource,
               {"optimizer.offload needs 2.0 EB of files for the 2 ranks of this host", " are free in " + folder.path(),
                ": something fits; memory.files may name"},
               [&] { require_offload(config, {.files = kMuch, .optimizer_files = kMuch}, 2, nearest); });
  config.memory.offload = "file";
  expect_error(ErrorKind::kResource, {"memory.offload and optimizer.offload need 2.0 EB of files", ": something fits"},
               [&] { require_offload(config, {.files = kMuch, .optimizer_files = kMuch - 1}, 2, nearest); });
  config.memory.offload = "none";
  config.optimizer.offload = "host";
  config.memory.host = "1MB";
  expect_error(ErrorKind::kResource,
               {"optimizer.offload = \"host\" needs 2.0 MB of the host's memory", "more than memory.host = 1MB",
                "optimizer.offload = \"file\""},
               [&] { require_offload(config, {.host = 2'000'000, .optimizer_host = 2'000'000}, 2, nearest); });
}

}  // namespace
}  // namespace annulus::optimizer_offload_test
