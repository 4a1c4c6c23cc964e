// Tests that memory.offload changes no bit of a training, and what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/tiers/transfers.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::offload_training_test {
namespace {

struct Curve {
  std::vector<double> numbers;  // losses, norms and the loss of a validation
  std::string digest;           // of the weights
  int64_t lent = 0;             // bytes, by the ranks that attend together
};

// Of rank 0; all ranks see the same.
Curve train(const Config& config, int ranks, int64_t steps) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  Curve curve;
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    Curve mine;
    for (int64_t i = 0; i < steps; ++i) {
      const StepResult r = training.step();
      mine.numbers.insert(mine.numbers.end(), {r.loss, r.gradient_norm});
    }
    mine.numbers.push_back(training.validate([] { return false; }).loss);
    mine.digest = training.weights_digest();
    mine.lent = training.mesh().axis("context").stats().bytes_lent;
    const bool offloads = config.memory.offload != "none";
    ASSERT_EQ(training.offloaded().has_value(), offloads);
    if (offloads) {
      EXPECT_GT(training.offloaded()->bytes_out, 0);
      EXPECT_EQ(training.offloaded()->bytes_out, training.offloaded()->bytes_back);
    }
    if (world.rank() == 0) curve = mine;
  });
  return curve;
}

// Whatever is sharded, accumulated, masked or dropped, what was offloaded comes back with the same bits.
TEST(OffloadTraining, ChangesNoBits) {
  const TestFolder folder;
  struct Case {
    const char* name;
    std::function<void(Config&)> set;
  };
  for (const Case& c :
       {Case{"plain", [](Config&) {}},
        // Whole blocks travel, which are lent as they are; of others the rows that are needed are copied.
        Case{"keys that every rank sees",
             [](Config& config) { config.model.pattern.all = parse_pattern("{ kind = 'full' }", "test"); }},
        Case{"bf16, level 1", [](Config& config) { config.model.dtype = "bf16", config.optimizer.shard = 1; }},
        Case{"level 2, accumulated", [](Config& config) { config.optimizer.shard = 2, config.data.accumulate = 2; }},
        Case{"level 3, documents",
             [](Config& config) {
               config.optimizer.shard = 3, config.data.documents = true;
               config.data.positions = "restart";
             }},
        Case{"dropout, norms of heads, all layers away", [](Config& config) {
               config.model.dropout = 0.2, config.model.qk_norm = true;
               config.memory.device_layers = 0;
             }}}) {
    Config config = tiny_config(folder);
    config.model.layers = 4;
    config.model.recompute = true;
    config.memory.files = folder.path();
    config.memory.device_layers = 1;
    config.attention.schedule = "ring";  // which keeps the block that arrived last, and sends it first in the backward
    c.set(config);
    for (const int ranks : {1, 2, 4}) {
      config.memory.offload = "none";
      const Curve without = train(config, ranks, 4);
      config.memory.offload = "file";
      const Curve with = train(config, ranks, 4);
      EXPECT_EQ(with.numbers, without.numbers) << c.name << ", " << ranks;
      EXPECT_EQ(with.digest, without.digest) << c.name << ", " << ranks;
      EXPECT_EQ(with.lent, without.lent) << c.name << ", " << ranks;  // what has returned is lent as well
      EXPECT_EQ(with.lent > 0, ranks > 1) << c.name << ", " << ranks;
    }
  }
}

TEST(OffloadTraining, RefusesWhatCannotBe) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.memory.offload = "file";
  expect_error(ErrorKind::kUsage, {"memory.offload = \"file\"", "model.recompute = true"},
               [&] { check_training(config, 1); });
  config.model.recompute = true;
  config.memory.offload = "host";
  expect_error(ErrorKind::kUsage, {"memory.offload = \"host\"", "\"cpu\"", "memory.offload = \"file\""},
               [&] { check_training(config, 1); });
  // What "auto" is, is known only when a rank computes; also where nothing is to be offloaded.
  config.device = "auto";
  expect_error(ErrorKind::kUsage, {"this rank computes on a CPU"}, [&] { train(config, 1, 1); });
  config.model.layers = 4;
  config.memory.offload = "file";
  config.memory.files = folder.path() + "/missing";
  expect_error(ErrorKind::kResource, {"memory.offload", folder.path() + "/missing", "memory.files"},
               [&] { train(config, 2, 1); });
}

TEST(OffloadTraining, RefusesMoreThanTheDiskHolds) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.memory.offload = "file";
  config.memory.files = folder.path();
  const auto nearest = [] { return std::string("something fits"); };
  require_offload(config, {.files = 1 << 20}, 2, nearest);
  expect_error(ErrorKind::kResource,
               {"memory.offload needs 2.0 EB of files for the 2 ranks of this host", " are free in " + folder.path(),
                ": something fits; memory.files may name"},
               [&] { require_offload(config, {.files = 2'000'000'000'000'000'000}, 2, nearest); });
  config.memory.files += "/missing";
  expect_error(ErrorKind::kResource, {folder.path() + "/missing"},
               [&] { require_offload(config, {.files = 1}, 1, nearest); });
  config.memory.offload = "host";
  MemoryPlan memory;
  memory.offloaded = 600, memory.offloaded_pinned = 800;
  config.model.layers = 5;  // of which three are offloaded, 200 bytes each
  EXPECT_EQ(plan_offload(config, memory, 2, RanksAre::kGpus).host, 1600);
  config.memory.host = "800B";
  const OffloadPlan half = plan_offload(config, memory, 2, RanksAre::kGpus);
  EXPECT_EQ(half.host, 800 + 2 * (2 * 800 / 3) + 2 * Transfers::kHeld);  // with two layers of each rank on their way
  EXPECT_EQ(half.files, 600 + 2 * 201);
}

}  // namespace
}  // namespace annulus::offload_training_test
