// Tests of what a training step does with its rows: packed documents, ignored targets, accumulation, and stages of
// data.context and data.accumulate.
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <mutex>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/model/dense_attention.h"
#include "tests/model/flat_parameters.h"
#include "tests/training/equal_losses.h"
#include "tests/training/kept_state.h"
#include "tests/training/tiny_run.h"
#include "training/training.h"

namespace annulus::training_data_test {
namespace {

// Writes files of 1 to 90 bytes, so that a row holds several and some cross its end; returns their glob pattern.
std::string write_documents(const TestFolder& folder) {
  std::filesystem::create_directories(folder.path() + "/documents");
  uint32_t state = 99;
  for (int i = 0; i < 60; ++i) {
    std::string text;
    state = state * 1664525 + 1013904223;
    const int length = 1 + static_cast<int>((state >> 24) % 90);
    for (int j = 0; j < length; ++j) {
      state = state * 1664525 + 1013904223;
      text += static_cast<char>('a' + (state >> 28));
    }
    std::ofstream(folder.path() + "/documents/" + std::to_string(100 + i)) << text;
  }
  return folder.path() + "/documents/*";
}

Config documents_config(const TestFolder& folder) {
  Config c = tiny_config(folder);
  c.model.dtype = "fp64";
  c.data.train = {write_documents(folder)};
  c.data.validation_fraction = 0;
  c.data.documents = true;
  c.data.batch = 2;
  c.optimizer.clip = 0;
  c.optimizer.weight_decay = 0;
  return c;
}

struct Learned {
  std::vector<double> losses, norms;
  std::vector<int64_t> targets;
  at::Tensor gradients;  // gradients of the mean over the targets of the last step
  double validation = 0;
  std::string digest;
};

Learned learn(const Config& config, int ranks, int64_t steps) {
  const Dataset data(config.data, config.run.seed);
  std::mutex mutex;
  Learned learned;
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    Learned mine;
    for (int64_t i = 0; i < steps; ++i) {
      const StepResult result = training.step();
      EXPECT_TRUE(result.applied) << result.note;
      mine.losses.push_back(result.loss);
      mine.norms.push_back(result.gradient_norm);
      mine.targets.push_back(result.targets);
    }
    mine.gradients = flat(training.model().parameters().views(
        [&](size_t unit) { return training.model_state().updated()[unit].gradients; }));
    if (data.has_validation()) mine.validation = training.validate([] { return false; }).loss;
    mine.digest = training.weights_digest();
    const std::lock_guard lock(mutex);
    if (!learned.losses.empty()) {
      EXPECT_EQ(learned.losses, mine.losses);
      EXPECT_EQ(learned.digest, mine.digest);
    }
    learned = std::move(mine);
  });
  return learned;
}

// The mean loss and gradients of the first step's documents, each run separately through the model from position 0.
Learned documents_alone(const Config& config) {
  const Dataset data(config.data, config.run.seed);
  const Model model(model_shape(config), static_cast<uint64_t>(config.run.seed), at::kDouble);
  double loss = 0;
  int64_t targets = 0;
  for (int64_t r = 0; r < data.rows(0); ++r) {
    Row row = data.row(0, r);
    int64_t begin = 0;
    for (const int64_t part : data.parts(0, r)) {
      const auto cut = [part, first = begin](std::vector<int64_t>& of) {
        return at::from_blob(of.data() + first, {1, part}, at::kLong);
      };
      begin += part;
      const at::Tensor counted = cut(row.targets);
      const int64_t count = counted.ne(kNoTarget).sum().item<int64_t>();
      targets += count;
      if (count == 0) continue;  // padding
      const at::Tensor sum =
          model.loss(cut(row.tokens), counted.view({-1}), model.rotary(at::arange(part, at::kLong)), dense_causal(), 1);
      sum.backward();
      loss += sum.item<double>();
    }
  }
  Learned alone;
  alone.losses = {loss / static_cast<double>(targets)};
  alone.targets = {targets};
  alone.gradients = flat(model.parameters().gradient_views()).div(static_cast<double>(targets));
  return alone;
}

TEST(TrainingData, PackedRowMatchesItsDocumentsRunSeparately) {
  const TestFolder folder;
  Config config = documents_config(folder);
  for (const std::string packing : {"stream", "best-fit", "document"}) {
    config.data.packing = packing;
    config.data.ignore = packing == "stream" ? std::vector<int64_t>{'c', 'd'} : std::vector<int64_t>{};
    const Learned alone = documents_alone(config);
    ASSERT_GT(alone.targets[0], 50);
    for (const std::string positions : {"running", "restart"}) {
      config.data.positions = positions;
      for (const int ranks : {1, 2, 4}) {
        for (const bool recompute : {false, true}) {
          config.model.recompute = recompute;
          const Learned packed = learn(config, ranks, 1);
          const std::string what = packing + ", positions " + positions + ", ranks " + std::to_string(ranks);
          EXPECT_EQ(packed.targets, alone.targets) << what;
          expect_equal_losses(packed.losses, alone.losses, what);
          const double apart = packed.gradients.sub(alone.gradients).norm().item<double>();
          EXPECT_LT(apart, fp64_tolerance(0) * alone.gradients.norm().item<double>()) << what;
          expect_equal_losses(packed.norms, {alone.gradients.norm().item<double>()}, what + ", gradient norm");
        }
      }
    }
  }
}

// The same rows in batches of 4, 2 and 1 differ only by rounding, however unequal their numbers of targets are.
TEST(TrainingData, AccumulationMatchesOneLargeBatch) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.data.packing = "document";
  config.data.batch = 4;
  const Learned whole = learn(config, 1, 4);
  EXPECT_LT(whole.targets[0], 4 * 64) << "the rows have padding";
  for (const auto& [batch, accumulate] : std::vector<std::pair<int64_t, int64_t>>{{2, 2}, {1, 4}}) {
    config.data.batch = batch;
    config.data.accumulate = accumulate;
    for (const int ranks : {1, 2}) {
      const Learned parts = learn(config, ranks, 4);
      EXPECT_EQ(parts.targets, whole.targets);
      expect_equal_losses(parts.losses, whole.losses, "batches of " + std::to_string(batch));
    }
  }
  // bf16 gradients of the parts are summed in fp32, so that their error is that of one batch.
  config.data.batch = 4;
  config.data.accumulate = 1;
  const at::Tensor exact = learn(config, 1, 1).gradients;
  config.model.dtype = "bf16";
  const double one = learn(config, 1, 1).gradients.sub(exact).norm().item<double>();
  config.data.batch = 1;
  config.data.accumulate = 4;
  EXPECT_LT(learn(config, 1, 1).gradients.sub(exact).norm().item<double>(), 1.2 * one);
}

TEST(TrainingData, ContextStagesDoNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.data.packing = "best-fit";
  config.data.batch = 4;
  config.data.validation_fraction = 0.2;
  config.data.context.stages = {
      {.step = 0, .context = 32}, {.step = 2, .context = 64, .batch = 2}, {.step = 4, .context = 48}};
  const Learned one = learn(config, 1, 6);
  EXPECT_GT(one.validation, 0);
  for (const int ranks : {2, 4}) {
    for (const int64_t axis : {1, 2}) {
      config.mesh.data = axis;
      const Learned more = learn(config, ranks, 6);
      EXPECT_EQ(more.targets, one.targets);
      expect_equal_losses(more.losses, one.losses, std::to_string(ranks) + " ranks");
      expect_equal_losses({more.validation}, {one.validation}, std::to_string(ranks) + " ranks, validation", 6);
    }
  }
}

TEST(TrainingData, ResumesWithinAndBetweenStages) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.run.steps = 8;
  config.data.packing = "best-fit";
  config.data.accumulate = 2;
  config.data.context.stages = {{.step = 0, .context = 32}, {.step = 3, .context = 64}, {.step = 6, .context = 48}};
  const Dataset data(config.data, config.run.seed);
  for (const int ranks : {1, 2}) {
    std::string straight;
    std::vector<KeptState> states(8);
    run_ranks(ranks, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      for (int i = 0; i < 8; ++i) {
        states[static_cast<size_t>(i)].keep(training);
        training.step();
      }
      if (world.rank() == 0) straight = training.weights_digest();
    });
    for (const int64_t step : {2, 3, 5, 6, 7}) {
      Dataset again(config.data, config.run.seed);
      const KeptState& kept = states[static_cast<size_t>(step)];
      EXPECT_TRUE(again.resume(kept.state.extra.at("data"), step).empty());
      run_ranks(ranks, [&](Communicator& world) {
        Training training(config, world, again, at::kCPU);
        kept.restore(training);
        for (int64_t i = step; i < 8; ++i) training.step();
        EXPECT_EQ(training.weights_digest(), straight) << "resumed after step " << step;
        EXPECT_EQ(training.uses()[0].rows, 8 * 2 * 2);
        EXPECT_EQ(training.tokens_done(), 2 * 2 * (3 * 32 + 3 * 64 + 2 * 48));
      });
    }
  }
}

TEST(TrainingData, ResumesWithinABatchRamp) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.run.steps = 7;
  config.data.packing = "best-fit";
  config.data.context = 32;
  config.data.batch = 2;
  config.data.accumulate.stages = {{.step = 0, .batches = 1}, {.step = 2, .batches = 2}, {.step = 5, .batches = 4}};
  const Dataset data(config.data, config.run.seed);
  for (const int64_t level : {0, 3}) {
    config.optimizer.shard = level;
    std::string straight;
    std::vector<KeptState> states(7);
    run_ranks(2, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      for (int64_t i = 0; i < 7; ++i) {
        keep_together(states[static_cast<size_t>(i)], training, world);
        EXPECT_EQ(training.step().tokens, (i < 2 ? 2 : i < 5 ? 4 : 8) * 32) << i;
      }
      const std::string digest = training.weights_digest();
      if (world.rank() == 0) straight = digest;
    });
    for (int64_t step = 1; step < 7; ++step) {
      Dataset again(config.data, config.run.seed);
      const KeptState& kept = states[static_cast<size_t>(step)];
      EXPECT_TRUE(again.resume(kept.state.extra.at("data"), step).empty()) << "the ramp is not a changed setting";
      run_ranks(2, [&](Communicator& world) {
        Training training(config, world, again, at::kCPU);
        kept.restore(training);
        for (int64_t i = step; i < 7; ++i) training.step();
        EXPECT_EQ(training.weights_digest(), straight) << "resumed after step " << step;
        EXPECT_EQ(training.uses()[0].rows, 2 * 2 + 3 * 4 + 2 * 8);
      });
    }
  }
}

// Two accumulated batches of 2 rows are the same step as one batch of 4 rows, also in a ramp.
TEST(TrainingData, BatchRampMatchesStagesOfLargerBatches) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.data.context.stages = {{.step = 0, .context = 32, .batch = 2}, {.step = 3, .context = 32, .batch = 4}};
  const Learned rows = learn(config, 1, 6);
  config.data.context.stages = {{.step = 0, .context = 32, .batch = 2}};
  config.data.accumulate.stages = {{.step = 0, .batches = 1}, {.step = 3, .batches = 2}};
  const Learned ramp = learn(config, 1, 6);
  EXPECT_EQ(ramp.targets, rows.targets);
  expect_equal_losses(ramp.losses, rows.losses, "ramp");
}

TEST(TrainingData, BatchWithoutTargetsIsNotApplied) {
  const TestFolder folder;
  Config config = documents_config(folder);
  for (char c = 'a'; c <= 'p'; ++c) config.data.ignore.push_back(c);
  const Dataset data(config.data, config.run.seed);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  const std::string before = training.weights_digest();
  const StepResult result = training.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.targets, 0);
  EXPECT_NE(result.note.find("no target"), std::string::npos) << result.note;
  EXPECT_EQ(training.weights_digest(), before);
  EXPECT_THROW(training.require_updates(), Error) << "nothing was learned";
  try {
    for (int64_t i = 0; i < config.optimizer.skips; ++i) training.step();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.message()).find("no target counted in 10 steps"), std::string::npos) << error.message();
  }
}

TEST(TrainingData, RefusesFilesThatChangeDuringTraining) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.run.steps = 50;
  const Dataset data(config.data, config.run.seed);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  training.step();
  for (const auto& file : std::filesystem::directory_iterator(folder.path() + "/documents")) {
    std::ofstream(file.path(), std::ios::app) << "more";
  }
  try {
    for (int i = 0; i < 20; ++i) training.step();
    FAIL() << "the files have changed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.message()).find("changed"), std::string::npos) << error.message();
  }
}

}  // namespace
}  // namespace annulus::training_data_test
