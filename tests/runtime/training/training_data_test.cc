// Tests of what a training step does with its rows: packed documents, ignored targets, accumulation, and stages of
// data.context and data.accumulate.
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <mutex>
#include <numeric>
#include <optional>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/training/training.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/data/whole_rows.h"
#include "tests/runtime/model/dense_attention.h"
#include "tests/runtime/model/flat_parameters.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/tiny_run.h"

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
  std::vector<SourceUse> uses;
  double validation = 0;
  std::string digest;
};

Learned learn(const Config& config, int ranks, int64_t steps) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
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
    mine.uses = training.uses();
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
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const Model model(model_shape(config), static_cast<uint64_t>(config.run.seed), at::kDouble);
  double loss = 0;
  int64_t targets = 0;
  for (int64_t r = 0; r < data.rows(0); ++r) {
    Row row = whole_row(data, 0, r);
    int64_t begin = 0;
    for (const int64_t part : data.drawn(0, r).parts().lengths) {
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

// 250 different bytes in files of these lengths, so that a token says where in the corpus it stands. Byte 0, which
// padding has, is not among them.
constexpr int64_t kLengths[] = {1, 40, 7, 2, 0, 1, 1, 23, 9, 3, 58, 1, 12, 5, 31, 2, 17, 36, 1};
static_assert(std::accumulate(std::begin(kLengths), std::end(kLengths), int64_t{0}) == 250);

std::string write_different_bytes(const TestFolder& folder) {
  std::filesystem::create_directories(folder.path() + "/different");
  char byte = 1;
  int name = 100;
  for (const int64_t length : kLengths) {
    std::ofstream out(folder.path() + "/different/" + std::to_string(name++), std::ios::binary);
    for (int64_t i = 0; i < length; ++i) out.put(byte++);
  }
  return folder.path() + "/different/*";
}

// What the tokens of a row say, without what the dataset says of it.
struct RowByHand {
  std::vector<int64_t> targets;    // of each position
  std::vector<int64_t> part;       // which of the row's documents it is in
  std::vector<int64_t> restarted;  // its position in that
  int64_t documents = 0;
};

// apart: nothing predicts the first token of a document.
RowByHand by_hand(const std::vector<int64_t>& tokens, bool apart) {
  std::vector<int64_t> document_of(1, -1);  // by token
  for (const int64_t& length : kLengths)
    document_of.insert(document_of.end(), static_cast<size_t>(length), &length - kLengths);
  const auto document = [&](int64_t token) { return document_of[static_cast<size_t>(token)]; };
  RowByHand row;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int64_t token = tokens[i], before = i == 0 ? -1 : tokens[i - 1];
    const bool goes_on = token == 0 ? before == 0 : token == before + 1 && document(token) == document(before);
    row.part.push_back(i == 0 ? 0 : row.part.back() + (goes_on ? 0 : 1));
    row.restarted.push_back(goes_on ? row.restarted.back() + 1 : 0);
    row.documents += token != 0 && !goes_on ? 1 : 0;
    const bool counts = token > 0 && token < 250 && (!apart || document(token) == document(token + 1));
    row.targets.push_back(counts ? token + 1 : kNoTarget);
  }
  return row;
}

struct ByHand {
  double loss = 0;  // of the mean over the targets
  int64_t targets = 0, documents = 0;
};

// The loss of some rows, each by itself, with dense attention under a mask.
ByHand rows_by_hand(const Config& config, const Model& model, const std::vector<Row>& rows) {
  const bool apart = config.data.documents || config.data.packing != "stream";
  const PatternSpec& pattern = config.model.pattern.all;
  const auto context = config.data.context.stages[0].context;
  const auto tensor = [&](const std::vector<int64_t>& of) { return at::tensor(of, at::kLong); };
  const at::Tensor place = at::arange(context, at::kLong);
  const at::Tensor back = place.unsqueeze(1).sub(place);
  ByHand all;
  double loss = 0;
  for (const Row& row : rows) {
    const RowByHand hand = by_hand(row.tokens, apart);
    EXPECT_EQ(row.targets, hand.targets);
    const int64_t counted = context - std::count(hand.targets.begin(), hand.targets.end(), kNoTarget);
    all.documents += hand.documents;
    all.targets += counted;
    if (counted == 0) continue;  // nothing but padding
    at::Tensor seen = back.ge(0);
    if (pattern.kind == PatternSpec::Kind::kWindow) seen = seen.logical_and(back.le(pattern.left));
    const at::Tensor part = tensor(hand.part);
    if (config.data.documents) seen = seen.logical_and(part.unsqueeze(1).eq(part));
    const at::Tensor positions = config.data.positions == "restart" ? tensor(hand.restarted) : place;
    const at::Tensor sum = model.loss(tensor(row.tokens).view({1, context}), tensor(hand.targets),
                                      model.rotary(positions), dense_masked(seen), 1);
    loss += sum.item<double>();
  }
  all.loss = loss / static_cast<double>(all.targets);
  return all;
}

// Losses and counts of all rows of an epoch, and of validation, in every combination of packing, documents, positions,
// pattern and layout.
TEST(TrainingData, EveryPackingMatchesItsRowsByHand) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.run.steps = 1;
  config.data.train = {write_different_bytes(folder)};
  config.data.validation_fraction = 0.3;
  config.data.context = 24;
  config.data.batch = 12;
  config.validation.batches = 1;
  config.optimizer.lr = 1e-30;  // validation has the weights of the first step
  config.optimizer.warmup = 0;
  const Model model(model_shape(config), static_cast<uint64_t>(config.run.seed), at::kDouble);
  const auto each_layout = [&](const std::string& packing, bool documents) {
    config.data.packing = packing;
    config.data.documents = documents;
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    ASSERT_GE(data.epochs(0, 1), packing == "document" ? 0.5 : 1);
    ASSERT_GT(data.validation_rows(0, 0), 1);
    std::vector<Row> rows, held_out;
    for (int64_t r = 0; r < 12; ++r) rows.push_back(whole_row(data, 0, r));
    for (int64_t r = 0; r < 12; ++r) held_out.push_back(whole(data, data.held_out(0, 0, r, 12)));
    PatternSpec window;
    window.kind = PatternSpec::Kind::kWindow;
    window.left = 9;
    for (const PatternSpec& pattern : {causal_pattern(), window}) {
      config.model.pattern = pattern;
      std::optional<double> running;
      for (const std::string positions : {"running", "restart"}) {
        config.data.positions = positions;
        const ByHand hand = rows_by_hand(config, model, rows);
        const double validation = rows_by_hand(config, model, held_out).loss;
        if (!running) running = hand.loss;
        // Only differences of rotary positions matter, so beginning again is seen where attention crosses documents.
        const bool differs = positions == "restart" && !documents && packing != "document";
        EXPECT_EQ(std::abs(hand.loss - *running) > 1e-9, differs) << packing;
        for (const std::string layout : {"one rank", "contiguous", "zigzag", "striped", "balanced", "per-document"}) {
          const bool alone = layout == "one rank";
          if (!alone) config.attention.layout = layout;
          const std::string what = packing + (documents ? ", documents apart, " : ", ") + config.model.pattern.text() +
                                   ", " + positions + ", " + layout;
          const Learned learned = learn(config, alone ? 1 : 2, 1);
          expect_equal_losses(learned.losses, {hand.loss}, what);
          expect_equal_losses({learned.validation}, {validation}, what + ", validation");
          EXPECT_EQ(learned.targets, (std::vector<int64_t>{hand.targets})) << what;
          EXPECT_EQ(learned.uses, (std::vector<SourceUse>{{12, hand.targets, hand.documents}})) << what;
        }
      }
    }
  };
  for (const std::string packing : {"stream", "best-fit", "document"}) {
    for (const bool documents : {false, true}) each_layout(packing, documents);
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
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  for (const auto& [ranks, layout] :
       std::vector<std::pair<int, std::string>>{{1, "zigzag"}, {2, "zigzag"}, {2, "balanced"}, {2, "per-document"}}) {
    config.attention.layout = layout;
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
      Dataset again(config.data, config.run.seed, config.model.vocab);
      const KeptState& kept = states[static_cast<size_t>(step)];
      EXPECT_TRUE(again.resume(kept.state.extra.at("data"), step).empty());
      run_ranks(ranks, [&](Communicator& world) {
        Training training(config, world, again, at::kCPU);
        kept.restore(training);
        for (int64_t i = step; i < 8; ++i) training.step();
        EXPECT_EQ(training.weights_digest(), straight) << layout << ", resumed after step " << step;
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
  const Dataset data(config.data, config.run.seed, config.model.vocab);
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
      Dataset again(config.data, config.run.seed, config.model.vocab);
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
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  const std::string before = training.weights_digest();
  const StepResult result = training.step();
  EXPECT_FALSE(result.applied);
  EXPECT_EQ(result.targets, 0);
  EXPECT_NE(result.note.find("no target"), std::string::npos) << result.note;
  EXPECT_EQ(training.weights_digest(), before);
  EXPECT_THROW(training.require_updates(), Error) << "nothing was learned";
  expect_error(ErrorKind::kUsage, {"no target counted in 10 steps"}, [&] {
    for (int64_t i = 0; i < config.optimizer.skips; ++i) training.step();
  });
}

// What one rank of a ring cannot read is an error on all of them, at once and with its reason.
TEST(TrainingData, FailedReadingIsRaisedOnEveryRankOfTheRing) {
  const TestFolder folders[2];
  run_ranks(2, [&](Communicator& world) {
    world.set_timeout(Seconds(60));
    const TestFolder& folder = folders[world.rank()];
    const Config config = documents_config(folder);
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    Training training(config, world, data, at::kCPU);
    if (world.rank() == 1) {
      for (const auto& file : std::filesystem::directory_iterator(folder.path() + "/documents")) {
        std::ofstream(file.path()) << "longer than any of the documents was before: " << std::string(100, 'x');
      }
    }
    expect_error(ErrorKind::kInput, {"changed"}, [&] { training.step(); });
  });
}

TEST(TrainingData, RefusesFilesThatChangeDuringTraining) {
  const TestFolder folder;
  Config config = documents_config(folder);
  config.run.steps = 50;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  training.step();
  for (const auto& file : std::filesystem::directory_iterator(folder.path() + "/documents")) {
    std::ofstream(file.path(), std::ios::app) << "more";
  }
  expect_error(ErrorKind::kInput, {"changed"}, [&] {
    for (int i = 0; i < 20; ++i) training.step();
  });
}

}  // namespace
}  // namespace annulus::training_data_test
