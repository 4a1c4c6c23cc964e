// Tests of training on targets that count in part: losses, gradients, validation and counts are those of logits that
// are weighed by hand, whatever packs the rows and divides them; steps without a target; and resuming.
#include <ATen/ops/arange.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/training.h"
#include "tests/common/equal_losses.h"
#include "tests/runtime/data/shards/token_writers.h"
#include "tests/runtime/data/whole_rows.h"
#include "tests/runtime/model/dense_attention.h"
#include "tests/runtime/model/flat_parameters.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/state/one_step.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::weighted_targets_test {
namespace {

// 250 different ids in documents of these lengths, so that a token says where in the corpus it stands. Id 0, which
// padding has, is not among them.
constexpr int64_t kLengths[] = {1, 40, 7, 2, 1, 1, 23, 9, 3, 58, 1, 12, 5, 31, 2, 17, 36, 1};
static_assert(std::accumulate(std::begin(kLengths), std::end(kLengths), int64_t{0}) == 250);

// Runs of 1 to 6 tokens with one of these weights, by id from 1 on. Nothing counts in one of the documents.
std::vector<float> drawn_weights(const std::vector<float>& values) {
  std::vector<float> weights;
  uint32_t state = 5;
  const auto draw = [&](uint32_t below) {
    state = state * 1664525 + 1013904223;
    return (state >> 16) % below;
  };
  while (weights.size() < 250) {
    const float weight = values[draw(static_cast<uint32_t>(values.size()))];
    for (uint32_t n = 1 + draw(6); n > 0 && weights.size() < 250; --n) weights.push_back(weight);
  }
  std::fill_n(weights.begin() + 51, 23, 0.0F);  // the seventh
  return weights;
}

std::string write_shard(const TestFolder& folder, const std::vector<float>& weights, const std::string& name = "a") {
  Documents documents;
  int64_t id = 1;
  for (const int64_t length : kLengths) {
    Ids& ids = documents.emplace_back(static_cast<size_t>(length));
    std::iota(ids.begin(), ids.end(), id);
    id += length;
  }
  const std::string path = folder.path() + "/" + name + ".tokens";
  put_file(path, annulus_shard(documents, 2, 256, std::string(16, '\x5a'), weights));
  return path;
}

Config weighted_config(const TestFolder& folder, const std::vector<float>& weights) {
  Config c = tiny_config(folder);
  c.model.dtype = "fp64";
  c.data.train = {write_shard(folder, weights)};
  c.data.validation_fraction = 0.3;
  c.data.context = 24;
  c.data.batch = 4;
  c.data.accumulate = 3;
  c.run.steps = 1;
  c.validation.batches = 3;
  c.optimizer.clip = 0;
  c.optimizer.weight_decay = 0;
  c.optimizer.lr = 1e-30;  // validation has the weights of the first step
  c.optimizer.warmup = 0;
  return c;
}

struct ByHand {
  at::Tensor loss;  // the sum over targets of weight times nats, divided by that of the weights
  double weight = 0;
  int64_t targets = 0;
};

// What the tokens of rows say, without what the dataset says of targets: the token after an id is the next id, if that
// is of the same document or documents follow each other.
ByHand by_hand(const Config& config, const std::vector<float>& weights, const Model& model,
               const std::vector<Row>& rows) {
  const bool apart = config.data.documents || config.data.packing != "stream";
  const auto context = config.data.context.stages[0].context;
  std::vector<int64_t> document_of(1, -1);  // by id
  for (const int64_t& length : kLengths)
    document_of.insert(document_of.end(), static_cast<size_t>(length), &length - kLengths);
  const auto document = [&](int64_t id) { return document_of[static_cast<size_t>(id)]; };
  ByHand all;
  at::Tensor sum;
  for (const Row& row : rows) {
    std::vector<int64_t> part, restarted, next;
    std::vector<double> of;
    for (size_t i = 0; i < row.tokens.size(); ++i) {
      const int64_t id = row.tokens[i], before = i == 0 ? -1 : row.tokens[i - 1];
      const bool goes_on = id == 0 ? before == 0 : id == before + 1 && document(id) == document(before);
      part.push_back(i == 0 ? 0 : part.back() + (goes_on ? 0 : 1));
      restarted.push_back(goes_on ? restarted.back() + 1 : 0);
      const bool predicts = id > 0 && id < 250 && (!apart || document(id) == document(id + 1));
      of.push_back(predicts ? static_cast<double>(weights[static_cast<size_t>(id)]) : 0);  // of id + 1
      next.push_back(predicts ? id + 1 : 0);
      EXPECT_EQ(row.targets[i], of.back() > 0 ? next.back() : kNoTarget);
      all.targets += of.back() > 0 ? 1 : 0;
      all.weight += of.back();
    }
    const auto tensor = [](const auto& values) { return at::tensor(values); };
    const at::Tensor place = at::arange(context, at::kLong), back = place.unsqueeze(1).sub(place);
    at::Tensor seen = back.ge(0);
    if (config.data.documents) seen = seen.logical_and(tensor(part).unsqueeze(1).eq(tensor(part)));
    const at::Tensor logits =
        model.logits(tensor(row.tokens).view({1, context}),
                     model.rotary(config.data.positions == "restart" ? tensor(restarted) : place), dense_masked(seen));
    const at::Tensor nats = at::log_softmax(logits.view({context, -1}), 1).gather(1, tensor(next).unsqueeze(1)).neg();
    const at::Tensor term = nats.squeeze(1).mul(at::tensor(of, at::kDouble)).sum();
    sum = sum.defined() ? sum.add(term) : term;
  }
  all.loss = sum.div(all.weight);
  return all;
}

TEST(WeightedTargets, LossesAndGradientsAreThoseByHand) {
  const TestFolder folder;
  for (const std::vector<float>& values : {std::vector<float>{0, 1}, {0, 0.1F, 1, 2.5F}}) {
    const std::vector<float> weights = drawn_weights(values);
    Config config = weighted_config(folder, weights);
    for (const std::string packing : {"stream", "best-fit", "document"}) {
      for (const bool documents : {false, true}) {
        config.data.packing = packing;
        config.data.documents = documents;
        const Dataset data(config.data, config.run.seed, config.model.vocab);
        std::vector<Row> rows, held_out;
        for (int64_t r = 0; r < 12; ++r) {
          rows.push_back(whole_row(data, 0, r));
          held_out.push_back(whole(data, data.held_out(0, 0, r, 12)));
        }
        for (const std::string positions : {"running", "restart"}) {
          config.data.positions = positions;
          const Model model(model_shape(config), static_cast<uint64_t>(config.run.seed), at::kDouble);
          const double validation = by_hand(config, weights, model, held_out).loss.item<double>();
          const ByHand hand = by_hand(config, weights, model, rows);
          hand.loss.backward();
          const at::Tensor gradients = flat(model.parameters().gradient_views());
          for (const auto& [ranks, data_axis, layout] :
               std::vector<std::tuple<int, int64_t, std::string>>{{1, 1, "zigzag"},
                                                                  {2, 1, "zigzag"},
                                                                  {2, 2, "zigzag"},
                                                                  {4, 2, "striped"},
                                                                  {4, 2, "balanced"},
                                                                  {4, 1, "contiguous"}}) {
            config.mesh.data = data_axis;
            config.attention.layout = layout;
            const OneStep learned = one_step(config, ranks);
            const std::string what = packing + (documents ? ", documents apart, " : ", ") + positions + ", " +
                                     std::to_string(ranks) + " ranks, " + layout;
            EXPECT_EQ(learned.step.targets, hand.targets) << what;
            EXPECT_NEAR(learned.step.weight, hand.weight, 1e-12 * hand.weight) << what;
            expect_equal_losses({learned.step.loss}, {hand.loss.item<double>()}, what);
            expect_equal_losses({learned.validation}, {validation}, what + ", validation");
            const double apart = learned.gradients.sub(gradients).norm().item<double>();
            EXPECT_LT(apart, fp64_tolerance(0) * gradients.norm().item<double>()) << what;
            expect_equal_losses({learned.step.gradient_norm}, {gradients.norm().item<double>()}, what + ", norm");
            EXPECT_EQ(learned.uses[0].rows, 12) << what;
          }
        }
      }
    }
  }
}

// Doubling all weights changes nothing, as losses are divided by their sum. Another mask is another corpus, whose rows
// have another order, so the step takes a whole epoch.
TEST(WeightedTargets, OnlyRatiosOfWeightsMatter) {
  const TestFolder folder;
  std::vector<float> weights = drawn_weights({0, 0.5F, 1});
  const auto epoch = [&] {
    Config config = weighted_config(folder, weights);
    config.data.validation_fraction = 0;
    config.data.batch = 11;
    config.data.accumulate = 1;
    EXPECT_EQ(Dataset(config.data, config.run.seed, config.model.vocab).epochs(0, 1), 1);
    return one_step(config, 2);
  };
  const OneStep once = epoch();
  for (float& weight : weights) weight *= 2;
  const OneStep twice = epoch();
  EXPECT_EQ(twice.step.targets, once.step.targets);
  EXPECT_EQ(twice.step.weight, 2 * once.step.weight);
  expect_equal_losses({twice.step.loss}, {once.step.loss}, "doubled weights");
  expect_equal_losses({twice.step.gradient_norm}, {once.step.gradient_norm}, "doubled weights, norm");
}

// A step in which no target counts has the loss 0 with the weight 0 and makes no update; training goes on.
TEST(WeightedTargets, StepWithoutTargetsGoesOn) {
  const TestFolder folder;
  std::vector<float> weights(250, 0);
  std::fill_n(weights.begin() + 80, 58, 1.0F);  // one document only
  Config config = weighted_config(folder, weights);
  config.data.validation_fraction = 0;
  config.data.packing = "document";
  config.data.batch = 1;
  config.data.accumulate = 1;
  config.run.steps = 40;
  config.optimizer.skips = 1000;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    int applied = 0, empty = 0;
    for (int i = 0; i < 40; ++i) {
      const std::string before = training.weights_digest();
      const StepResult result = training.step();
      ASSERT_TRUE(std::isfinite(result.loss));
      ASSERT_TRUE(std::isfinite(result.gradient_norm));
      EXPECT_EQ(result.applied, result.weight > 0);
      if (result.weight > 0) {
        ++applied;
        EXPECT_GT(result.loss, 0);
        continue;
      }
      ++empty;
      EXPECT_EQ(result.loss, 0);
      EXPECT_EQ(result.gradient_norm, 0);
      EXPECT_EQ(result.targets, 0);
      EXPECT_NE(result.note.find("no target in its rows counts"), std::string::npos) << result.note;
      EXPECT_EQ(training.weights_digest(), before);
    }
    EXPECT_GT(applied, 2);
    EXPECT_GT(empty, 10);
  });
}

TEST(WeightedTargets, ResumesWithTheSameMaskAndNoticesAnother) {
  const TestFolder folder;
  Config config = weighted_config(folder, drawn_weights({0, 0.1F, 1, 2.5F}));
  config.data.packing = "best-fit";
  config.data.batch = 2;
  config.data.accumulate = 1;
  config.run.steps = 6;
  config.optimizer.lr = 1e-2;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::string straight;
  KeptState kept;
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    for (int i = 0; i < 6; ++i) {
      if (i == 3) keep_together(kept, training, world);
      training.step();
    }
    const std::string digest = training.weights_digest();
    if (world.rank() == 0) straight = digest;
  });
  Dataset again(config.data, config.run.seed, config.model.vocab);
  EXPECT_TRUE(again.resume(kept.state.extra.at("data"), 3).empty());
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, again, at::kCPU);
    kept.restore(training);
    for (int i = 3; i < 6; ++i) training.step();
    EXPECT_EQ(training.weights_digest(), straight);
  });
  // The same tokens with another mask are another source, and ranks that have different ones do not train together.
  config.data.train = {write_shard(folder, drawn_weights({0, 1}), "b")};
  Dataset other(config.data, config.run.seed, config.model.vocab);
  EXPECT_NE(other.fingerprint(), data.fingerprint());
  const std::vector<std::string> told = other.resume(kept.state.extra.at("data"), 3);
  ASSERT_EQ(told.size(), 2U);
  EXPECT_NE(told[0].find("was changed or removed"), std::string::npos) << told[0];
}

}  // namespace
}  // namespace annulus::weighted_targets_test
