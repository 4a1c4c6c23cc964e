// Tests of training on prefix trees: losses and gradients are those of the same rollouts packed apart as documents, for
// all numbers of ranks, layouts and schedules; resuming; and patterns that trees do not take.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/training.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/shards/written_trees.h"
#include "tests/runtime/model/flat_parameters.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/state/one_step.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::tree_training_test {
namespace {

// A configuration whose step is an epoch of the shard.
Config epoch_config(const TestFolder& folder, const std::string& name, const std::string& shard, int64_t context) {
  Config c = tiny_config(folder);
  put_file(folder.path() + "/" + name, shard);
  c.model.dtype = "fp64";
  c.data.train = {folder.path() + "/" + name};
  c.data.validation_fraction = 0;
  c.data.context = context;
  c.data.packing = "best-fit";
  c.data.documents = true;
  c.data.positions = "restart";
  c.attention.even = false;
  c.run.steps = 1;
  c.optimizer.clip = 0;
  c.optimizer.weight_decay = 0;
  const Corpus corpus(c.data.train.list[0]);
  c.data.batch = RowIndex::make(corpus, Dataset::pack_settings(c.data, context))->rows(Split::kTrain);
  return c;
}

OneStep learn(const Config& config, int ranks) {
  EXPECT_EQ(Dataset(config.data, config.run.seed, config.model.vocab).epochs(0, 1), 1);
  return one_step(config, ranks);
}

TEST(TreeTraining, LossAndGradientsAreThoseOfRolloutsApart) {
  for (const bool prompts : {false, true}) {
    const TestFolder folder;
    const std::vector<Group> groups = drawn_groups({1, 0.5F, 2}, prompts);
    const WrittenTrees trees(groups);
    const Config documents = epoch_config(folder, "apart.tokens", shard_of_documents(groups), 64);
    const OneStep apart = learn(documents, 1);
    for (const int64_t context : {37, 64, 128}) {  // the first divides trees among rows
      Config config = epoch_config(folder, "trees.tokens", trees.shard(), context);
      for (const auto& [ranks, layout, schedule] :
           std::vector<std::tuple<int, std::string, std::string>>{{1, "zigzag", "auto"},
                                                                  {2, "zigzag", "ring"},
                                                                  {2, "balanced", "group-cast"},
                                                                  {4, "striped", "all-gather"},
                                                                  {4, "contiguous", "auto"},
                                                                  {4, "auto", "ring"}}) {
        config.attention.layout = layout;
        config.attention.schedule = schedule;
        const OneStep learned = learn(config, ranks);
        const std::string what = "rows of " + std::to_string(context) + ", " + std::to_string(ranks) + " ranks, " +
                                 layout + ", " + schedule + (prompts ? ", prompts count" : "");
        EXPECT_NEAR(learned.step.weight, apart.step.weight, 1e-12 * apart.step.weight) << what;
        EXPECT_LT(learned.step.targets, apart.step.targets) << what;
        expect_equal_losses({learned.step.loss}, {apart.step.loss}, what);
        expect_equal_losses({learned.step.gradient_norm}, {apart.step.gradient_norm}, what + ", norm");
        const double difference = learned.gradients.sub(apart.gradients).norm().item<double>();
        EXPECT_LT(difference, fp64_tolerance(0) * apart.gradients.norm().item<double>()) << what;
      }
    }
  }
}

// Sources with and without trees share batches.
TEST(TreeTraining, TreesAndDocumentsMix) {
  const TestFolder folder;
  const std::vector<Group> all = drawn_groups({1, 2}, true);
  const std::vector<Group> some(all.begin(), all.begin() + 4), others(all.begin() + 4, all.end());
  const OneStep apart = learn(epoch_config(folder, "apart.tokens", shard_of_documents(all), 64), 1);
  Config config = epoch_config(folder, "trees.tokens", WrittenTrees(some).shard(), 64);
  const Config plain = epoch_config(folder, "others.tokens", shard_of_documents(others), 64);
  config.data.train = std::vector<SourceConfig>{{.files = {folder.path() + "/trees.tokens"}},
                                                {.files = {folder.path() + "/others.tokens"}}};
  config.data.batch += plain.data.batch;
  for (const int ranks : {1, 2}) {
    const OneStep mixed = learn(config, ranks);
    EXPECT_NEAR(mixed.step.weight, apart.step.weight, 1e-12 * apart.step.weight);
    expect_equal_losses({mixed.step.loss}, {apart.step.loss}, "mixed");
    expect_equal_losses({mixed.step.gradient_norm}, {apart.step.gradient_norm}, "mixed, norm");
  }
}

TEST(TreeTraining, ValidatesAndResumesAsOnDocuments) {
  const TestFolder folder;
  Config config = epoch_config(folder, "trees.tokens", WrittenTrees(drawn_groups({1, 2})).shard(), 40);
  config.data.validation_fraction = 0.3;
  config.data.batch = 2;
  config.run.steps = 6;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  ASSERT_TRUE(data.has_validation());
  double validation = 0;
  for (const int ranks : {1, 2, 4}) {
    std::string straight;
    KeptState kept;
    run_ranks(ranks, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      for (int i = 0; i < 6; ++i) {
        if (i == 3) keep_together(kept, training, world);
        training.step();
      }
      const double loss = training.validate([] { return false; }).loss;
      const std::string digest = training.weights_digest();
      if (world.rank() != 0) return;
      straight = digest;
      if (ranks == 1) validation = loss;
      expect_equal_losses({loss}, {validation}, std::to_string(ranks) + " ranks", 6);
    });
    Dataset again(config.data, config.run.seed, config.model.vocab);
    EXPECT_TRUE(again.resume(kept.state.extra.at("data"), 3).empty());
    run_ranks(ranks, [&](Communicator& world) {
      Training training(config, world, again, at::kCPU);
      kept.restore(training);
      for (int i = 3; i < 6; ++i) training.step();
      EXPECT_EQ(training.weights_digest(), straight);
    });
  }
}

TEST(TreeTraining, RefusesOtherPatternsThanCausal) {
  const TestFolder folder;
  Config config = epoch_config(folder, "trees.tokens", WrittenTrees(drawn_groups({1})).shard(), 64);
  config.model.pattern = parse_pattern("{ kind = 'window', left = 15, right = 0 }", "test");
  std::vector<Stage> stages = check_training(config, 1);
  take_data(stages, true, false);
  EXPECT_TRUE(stages[0].weighs);
  expect_error(ErrorKind::kPlan,
               {"the data hold prefix trees", "kind = \"window\"", "model.pattern = { kind = \"causal\" }"},
               [&] { take_data(stages, true, true); });
}

}  // namespace
}  // namespace annulus::tree_training_test
