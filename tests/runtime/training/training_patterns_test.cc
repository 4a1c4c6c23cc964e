// Tests of training a small model with every pattern: the loss over ten steps in fp64 does not depend on the number of
// ranks; training_test.cc has thirty.
// They also test what a step plans: nothing if its patterns are unchanged, and its documents one step ahead.
#include <ATen/ops/arange.h>
#include <ATen/ops/eye.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/plan/choice.h"
#include "attention/plan/layout.h"
#include "attention/proof/plans.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/tensor_files/block_map_file.h"
#include "runtime/tensor_files/safetensors.h"
#include "runtime/training/job.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/training.h"
#include "tests/common/equal_losses.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/tiny_run.h"

namespace annulus::training_patterns_test {
namespace {

constexpr int64_t kSteps = 10;

PatternSpec pattern(const std::string& toml) { return parse_pattern(toml, "test"); }

// Like tiny_config, but with rows of 9 blocks of 16, of which the last is partial.
Config config_with(const TestFolder& folder, LayerPatterns patterns) {
  Config c = tiny_config(folder);
  c.model.dtype = "fp64";
  c.run.steps = kSteps;
  c.data.context = 136;
  c.data.batch = 2;
  c.model.pattern = std::move(patterns);
  return c;
}

std::vector<std::string> write_documents(const TestFolder& folder) {
  std::ifstream in(folder.write_text(20000), std::ios::binary);
  std::vector<std::string> files;
  std::string piece;
  for (int64_t i = 0, length = 0; in; ++i) {
    length = 1 + (length * 31 + 17) % 120;
    piece.resize(static_cast<size_t>(length));
    in.read(piece.data(), length);
    files.push_back(folder.path() + "/document-" + std::to_string(1000 + i));
    std::ofstream(files.back(), std::ios::binary).write(piece.data(), in.gcount());
  }
  return files;
}

std::vector<double> losses(const Config& config, int ranks, int64_t steps = kSteps) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::vector<double> losses;
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    std::vector<double> mine;
    for (int64_t i = 0; i < steps; ++i) mine.push_back(training.step().loss);
    mine.push_back(training.validate([] { return false; }).loss);
    if (world.rank() == 0) losses = mine;
  });
  return losses;
}

void expect_same_at_any_ranks(const Config& config) {
  const std::vector<double> one = losses(config, 1);
  EXPECT_LT(one[kSteps - 1], one[0]) << "it learns";
  for (const int ranks : {2, 4}) expect_equal_losses(losses(config, ranks), one, std::to_string(ranks) + " ranks");
}

struct Named {
  std::string name;
  std::string toml;
  friend std::ostream& operator<<(std::ostream& out, const Named& named) { return out << named.toml; }
};

class EveryPattern : public ::testing::TestWithParam<Named> {};

TEST_P(EveryPattern, LossDoesNotDependOnTheRanks) {
  const TestFolder folder;
  expect_same_at_any_ranks(config_with(folder, pattern(GetParam().toml)));
}

// The gradients of sinks are parts of the ranks' queries, which every level of sharding adds up, and recomputation and
// offload change nothing.
TEST(TrainingSoftmax, LossWithSinksAndACapDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(folder, pattern("{ kind = 'window', left = 20, right = 0 }"));
  config.model.attention_sinks = true;
  config.model.softcap = 0.5;
  const std::vector<double> one = losses(config, 1);
  EXPECT_LT(one[kSteps - 1], one[0]) << "it learns";
  Config without = config;
  without.model.attention_sinks = false;
  EXPECT_NE(losses(without, 1)[0], one[0]);
  without.model.attention_sinks = true, without.model.softcap = 0;
  EXPECT_NE(losses(without, 1)[0], one[0]);
  for (const int64_t level : {0, 1, 2, 3}) {
    for (const int ranks : {2, 4}) {
      Config c = config;
      c.optimizer.shard = level;
      c.model.recompute = level >= 2;
      if (level == 3) c.memory.offload = "file", c.memory.files = folder.path(), c.memory.device_layers = 0;
      expect_equal_losses(losses(c, ranks), one, "level " + std::to_string(level) + ", " + std::to_string(ranks));
    }
  }
}

// They are trained as well, in the layers that have them: without weight decay, as all vectors.
TEST(TrainingSoftmax, SinksAreTrained) {
  const TestFolder folder;
  Config config = config_with(folder, causal_pattern());
  const auto train = [&] {
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    std::vector<std::string> trained;
    run_ranks(2, [&](Communicator& world) {
      Training training(config, world, data, at::kCPU);
      training.step(), training.step();
      if (world.rank() != 0) return;
      for (const NamedTensor& p : training.model().parameters().value_views()) {
        if (!p.name.ends_with("self_attn.sinks")) continue;
        trained.push_back(p.name);
        EXPECT_TRUE(p.tensor.ne(0).all().item<bool>()) << p.name;
      }
    });
    EXPECT_EQ(parameter_count(config.model) - parameter_count([&] {
                ModelShape without = config.model;
                without.attention_sinks = false;
                return without;
              }()),
              static_cast<int64_t>(trained.size()) * config.model.heads);
    return trained;
  };
  const std::string first = "model.layers.0.self_attn.sinks", second = "model.layers.1.self_attn.sinks";
  config.model.attention_sinks = true;
  EXPECT_EQ(train(), (std::vector<std::string>{first, second}));
  config.model.attention_sinks = std::vector<bool>{false, true};
  EXPECT_EQ(train(), (std::vector<std::string>{second}));
}

TEST(TrainingSoftmax, LossWithSinksInSomeLayersDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(folder, pattern("{ kind = 'window', left = 20, right = 0 }"));
  config.model.attention_sinks = std::vector<bool>{true, false};
  config.model.recompute = true;
  const std::vector<double> one = losses(config, 1);
  for (const int64_t level : {0, 3}) {
    config.optimizer.shard = level;
    expect_equal_losses(losses(config, 2), one, "level " + std::to_string(level));
  }
  for (const LayerSwitch& other : {LayerSwitch(true), LayerSwitch(false), LayerSwitch({false, true})}) {
    config.model.attention_sinks = other;
    EXPECT_NE(losses(config, 2)[1], one[1]) << other.text();
  }
}

// The seconds that the layers of a configuration are predicted to take.
double predicted(const Config& config, int ranks) {
  const Stage stage = check_training(config, ranks)[0];
  double seconds = 0;
  const std::vector<PlanRequest> requests = stage.layers.of_rows(0, stage.batch);
  for (const size_t which : stage.layers.of_layer) seconds += choose_plan(requests[which]).chosen().seconds();
  return seconds;
}

// Layers of one pattern may want another layout than those of another: all of them together choose.
TEST(TrainingPatterns, LayoutAutoTakesLeastTimeOverAllLayers) {
  const TestFolder folder;
  const PatternSpec window = pattern("{ kind = 'window', left = 3, right = 0 }");
  std::set<LayoutKind> chosen;
  for (const LayerPatterns& patterns :
       {LayerPatterns(causal_pattern()), LayerPatterns(window), LayerPatterns({window, causal_pattern()})}) {
    Config config = config_with(folder, patterns);
    config.model.dtype = "fp32";
    config.model.heads = config.model.kv_heads = 4;
    config.data.context = 4096;
    config.attention.layout = "auto";
    const LayerRequests layers = check_training(config, 4)[0].layers;
    const double seconds = predicted(config, 4);
    chosen.insert(layers.distinct[0].layout);
    const std::string reason = std::string(to_string(layers.distinct[0].layout)) + ", " + seconds_text(seconds) + " ";
    EXPECT_TRUE(layers.layout_reason.starts_with(reason)) << layers.layout_reason << " for " << reason;
    for (const std::string& layout : layout_names()) {
      config.attention.layout = layout;
      EXPECT_LE(seconds, 1.02 * predicted(config, 4)) << patterns.text() << ", " << layout;
      EXPECT_NE(layers.layout_reason.find(layout), std::string::npos) << layers.layout_reason;
    }
  }
  EXPECT_GT(chosen.size(), 1U);
}

TEST(TrainingPatterns, LayoutAutoLossDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(folder, pattern("{ kind = 'window', left = 3, right = 0 }"));
  config.attention.layout = "auto";
  expect_same_at_any_ranks(config);
  config.data.documents = true;
  EXPECT_EQ(check_training(config, 4)[0].layers.distinct[0].layout, LayoutKind::kBalanced);
  EXPECT_TRUE(layout_follows_documents(config));
  config.attention.schedule = "ring";
  EXPECT_EQ(check_training(config, 4)[0].layers.distinct[0].layout, LayoutKind::kPerDocument);
  config.attention.layout = "per-document";
  EXPECT_TRUE(layout_follows_documents(config));
}

INSTANTIATE_TEST_SUITE_P(
    Training, EveryPattern,
    ::testing::Values(
        Named{"Causal", "{ kind = 'causal' }"}, Named{"Window", "{ kind = 'window', left = 20, right = 0 }"},
        Named{"DilatedLse", "{ kind = 'dilated', segment_lengths = [24, 70], dilation_rates = [1, 3], causal = true }"},
        Named{"DilatedMean",
              "{ kind = 'dilated', segment_lengths = [24, 70], dilation_rates = [1, 2], combine = 'mean', "
              "offsets = 'groups', causal = true }"},
        Named{"Local", "{ kind = 'blocks', map = 'local', block = 16, window_blocks = 1, causal = true }"},
        Named{"DilatedBlocks",
              "{ kind = 'blocks', map = 'dilated', block = 16, window_blocks = 4, rate = 2, causal = true }"},
        Named{"GlobalLocal",
              "{ kind = 'blocks', map = 'global-local', block = 16, global_blocks = 1, window_blocks = 1, "
              "causal = true }"},
        Named{"BigBird",
              "{ kind = 'blocks', map = 'bigbird', block = 16, window_blocks = 1, global_blocks = 1, "
              "random_blocks = 1, seed = 3, causal = true }"},
        Named{"Strided",
              "{ kind = 'blocks', map = 'strided', block = 16, window_blocks = 1, stride = 3, causal = true }"},
        Named{"Hierarchical",
              "{ kind = 'blocks', map = 'hierarchical', block = 16, levels = [[1, 1], [3, 6]], causal = true }"},
        Named{"Adaptive", "{ kind = 'blocks', map = 'adaptive', block = 16, keep = 3, causal = true }"},
        Named{"Documents", "{ kind = 'causal', documents = [50, 3, 83] }"},
        Named{"Union",
              "{ kind = 'union', of = [{ kind = 'window', left = 9, right = 9 }, { kind = 'dilated', "
              "segment_lengths = [64], dilation_rates = [2] }], causal = true }"}),
    [](const auto& info) { return info.param.name; });

TEST(TrainingPatterns, BlockMapFileLossDoesNotDependOnTheRanks) {
  const TestFolder folder;
  const std::string file = folder.path() + "/map.safetensors";
  std::vector<uint8_t> active(4 * 9 * 9);
  for (size_t i = 0; i < active.size(); ++i) active[i] = i % 3 != 0 || i % 81 % 10 == 0;  // one map per head
  write_block_map(file, block_map_from_dense(active.data(), 16, 1, 4, 9, 9));
  const Config config = config_with(
      folder, pattern("{ kind = 'blocks', map = 'file', block = 16, file = '" + file + "', causal = true }"));
  expect_same_at_any_ranks(config);
  // Training uses the map that was checked: the file is read only once.
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  std::vector<Stage> checked = check_training(config, 1);
  std::filesystem::remove(file);
  EXPECT_TRUE(Training(config, std::move(checked), *world, data, at::kCPU, {}).step().applied);
}

// A pattern with an entry per row refers to the rows of the global batch, however many ranks share them.
TEST(TrainingPatterns, PerRowPatternsIndexTheGlobalBatch) {
  const TestFolder folder;
  const std::string file = folder.path() + "/map.safetensors";
  std::vector<uint8_t> active(4 * 9 * 9);
  for (size_t i = 0; i < active.size(); ++i) active[i] = i / 81 >= i % 9 || i % 81 % 10 == 0;  // one map per row
  write_block_map(file, block_map_from_dense(active.data(), 16, 4, 1, 9, 9));
  for (const std::string& toml :
       {std::string("{ kind = 'causal', documents = [[136], [1, 135], [60, 76], [30, 30, 76]] }"),
        "{ kind = 'blocks', map = 'file', block = 16, file = '" + file + "', causal = true }",
        std::string("{ kind = 'union', of = [{ kind = 'window', left = 5, right = 0 }, { kind = 'slices', slices = ["
                    "{ queries = [0, 1, 136], keys = [0, 2, 68], batch = [1, 2, 2] }] }], causal = true }")}) {
    Config config = config_with(folder, pattern(toml));
    config.data.batch = 4;
    const std::vector<double> one = losses(config, 1, 4);
    for (const int data : {2, 4}) {
      config.mesh.data = data;
      expect_equal_losses(losses(config, 4, 4), one, toml + ", data " + std::to_string(data));
    }
  }
  // A pattern with entries for half of the batch is refused.
  Config config = config_with(folder, pattern("{ kind = 'causal', documents = [[136], [1, 135]] }"));
  config.data.batch = 4;
  config.mesh.data = 2;
  EXPECT_THROW(check_training(config, 2), Error);
}

TEST(TrainingPatterns, DocumentsOfFilesLossDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(folder, causal_pattern());
  config.data.train = write_documents(folder);
  config.data.documents = true;
  const std::vector<double> one = losses(config, 1);
  expect_same_at_any_ranks(config);
  config.mesh.data = 2;
  expect_equal_losses(losses(config, 4), one, "2 x 2");
  config.mesh.data = 1;
  config.data.documents = false;
  EXPECT_GT(std::abs(losses(config, 1, 1)[0] - one[0]), 1e-6) << "the documents mask some keys";
}

// Each rank reads the bits of the queries that it owns or computes, and plans with others are refused.
TEST(TrainingPatterns, LossWithAMaskOfAFileDoesNotDependOnTheRanks) {
  const TestFolder folder;
  const std::string path = folder.path() + "/mask.safetensors";
  const at::Tensor shown = at::arange(2 * 136 * 136).mul(2654435761).remainder(97).lt(60).view({2, 1, 136, 136});
  write_safetensors(path, {{"mask", shown.logical_or(at::eye(136, at::kBool))}});
  Config config = config_with(folder, pattern("{ kind = 'causal', mask = '" + path + "' }"));
  const std::vector<double> one = losses(config, 1);
  for (const auto& [ranks, data, layout, schedule] :
       std::vector<std::tuple<int, int64_t, std::string, std::string>>{{2, 1, "zigzag", "ring"},
                                                                       {4, 2, "striped", "all-gather"},
                                                                       {4, 2, "zigzag", "ulysses"},
                                                                       {4, 1, "balanced", "auto"}}) {
    config.mesh.data = data;
    config.attention.layout = layout;
    config.attention.schedule = schedule;
    expect_equal_losses(losses(config, ranks), one, std::to_string(ranks) + " ranks, " + layout);
  }
  config.mesh.data = 1;
  config.data.train = write_documents(folder);
  config.data.documents = true;
  config.attention.layout = "balanced";  // by the documents of each batch: ranks hold all bits
  expect_equal_losses(losses(config, 2, 3), losses(config, 1, 3), "documents apart");
}

TEST(TrainingPatterns, PerLayerPatternsLossDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(
      folder, std::vector<PatternSpec>{
                  pattern("{ kind = 'window', left = 12, right = 0 }"),
                  pattern("{ kind = 'dilated', segment_lengths = [200], dilation_rates = [2], causal = true }")});
  expect_same_at_any_ranks(config);
  const double straight = losses(config, 1, 1)[0];
  std::swap(config.model.pattern.each[0], config.model.pattern.each[1]);
  EXPECT_GT(std::abs(losses(config, 1, 1)[0] - straight), 1e-6) << "the order matters";
}

// Layers whose patterns and rotary settings repeat with different lengths, and every form that a layer may have.
TEST(TrainingPatterns, LayersThatDifferDoNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(
      folder, std::vector<PatternSpec>{pattern("{ kind = 'window', left = 12, right = 0 }"), causal_pattern()});
  config.model.layers = 3;
  config.model.rope_layers.cycle = {
      {.own = true, .theta = 300}, {}, {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}}};
  config.model.qk_norm = config.model.post_norms = config.model.norm_zero_centered = config.model.scale_embeddings =
      true;
  config.model.activation = Activation::kGeluTanh;
  config.model.query_pre_attn_scalar = 3;
  config.model.tie_embeddings = true;
  expect_same_at_any_ranks(config);
  const std::vector<double> one = losses(config, 1);
  config.model.recompute = true;
  config.data.positions = "restart";  // with one document in a row, the same positions
  for (const int64_t level : {0, 3}) {
    config.optimizer.shard = level;
    expect_equal_losses(losses(config, 2), one, "level " + std::to_string(level));
  }
  config.memory.offload = "file";
  config.memory.files = folder.path();
  config.memory.device_layers = 0;
  expect_equal_losses(losses(config, 2), one, "offloaded");
  const auto differs = [&](const std::string& what, auto change) {
    Config other = config;
    change(other.model);
    EXPECT_GT(std::abs(losses(other, 1, 2)[1] - one[1]), 1e-6) << what;
  };
  differs("patterns", [](ModelSection& m) { std::swap(m.pattern.each[0], m.pattern.each[1]); });
  differs("rotary settings", [](ModelSection& m) { std::swap(m.rope_layers.cycle[0], m.rope_layers.cycle[1]); });
  differs("the scale of scores", [](ModelSection& m) { m.query_pre_attn_scalar = 0; });
  differs("the activation", [](ModelSection& m) { m.activation = Activation::kSilu; });
  differs("the scale of embeddings", [](ModelSection& m) { m.scale_embeddings = false; });
}

TEST(TrainingPatterns, DropoutDoesNotDependOnTheRanks) {
  const TestFolder folder;
  Config config = config_with(folder, causal_pattern());
  config.model.dropout = 0.2;
  expect_same_at_any_ranks(config);
  const std::vector<double> with = losses(config, 1, 2);
  config.mesh.data = 2;
  expect_equal_losses(losses(config, 2, 2), with, "2 data");
  config.mesh.data = 1;
  config.model.dropout = 0;
  const std::vector<double> without = losses(config, 1, 2);
  EXPECT_GT(std::abs(with[0] - without[0]), 1e-6);
  // Before the first step the models differ only in dropout, which validation does not apply.
  config.model.dropout = 0.2;
  const double before = losses(config, 1, 0)[0];
  config.model.dropout = 0;
  EXPECT_EQ(before, losses(config, 1, 0)[0]);
}

TEST(TrainingPatterns, UnchangedPatternIsPlannedOnce) {
  const TestFolder folder;
  const Config config =
      config_with(folder, pattern("{ kind = 'blocks', map = 'strided', block = 16, window_blocks = 1, stride = 3 }"));
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(2, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    training.step();
    world.barrier({"test", 0});
    const PlanStats before = plan_stats();
    world.barrier({"test", 1});
    for (int i = 0; i < 3; ++i) training.step();
    training.validate([] { return false; });
    world.barrier({"test", 2});
    const PlanStats after = plan_stats();
    EXPECT_EQ(after.patterns_made, before.patterns_made);
    EXPECT_EQ(after.programs_made, before.programs_made);
    world.barrier({"test", 3});
  });
}

TEST(TrainingPatterns, DocumentsArePlannedOncePerStepAndAhead) {
  const TestFolder folder;
  Config config = config_with(folder, causal_pattern());
  config.data.train = write_documents(folder);
  config.data.documents = true;
  config.run.seed = 77;  // gives documents that no other test has planned
  config.run.steps = 4;
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  run_ranks(1, [&](Communicator& world) {
    const PlanStats begin = plan_stats();
    Training training(config, world, data, at::kCPU);
    for (int i = 0; i < 4; ++i) training.step();
    const PlanStats end = plan_stats();
    // The two layers share a plan, and what was planned ahead is not planned again. Proofs of plans do not count here.
    EXPECT_EQ(end.programs.misses - begin.programs.misses, 4);
    EXPECT_EQ(end.patterns_made - begin.patterns_made, 4);
  });
}

TEST(TrainingPatterns, FlopsCountThePairsOfThePattern) {
  const TestFolder folder;
  const auto flops = [&](const std::string& toml) {
    const Config config = config_with(folder, pattern(toml));
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    const std::shared_ptr<Communicator> world = make_self_communicator();
    return Training(config, *world, data, at::kCPU).flops_per_token();
  };
  const double full = flops("{ kind = 'full' }"), causal = flops("{ kind = 'causal' }");
  // There are 2 layers of 4 heads of size 8, and each pair of query and key costs 12 * 8 flops.
  EXPECT_DOUBLE_EQ(full - causal, 2 * 4 * 12 * 8 * (136 - 137 / 2.0));
  // `keep = 1` keeps one of the 9 blocks, the query's own.
  EXPECT_DOUBLE_EQ(flops("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 1, causal = true }"),
                   flops("{ kind = 'blocks', map = 'local', block = 16, window_blocks = 0, causal = true }"));
}

TEST(TrainingPatterns, CheckRefusesInvalidPatterns) {
  const TestFolder folder;
  const auto refused = [&](const std::string& toml, const std::string& word, ErrorKind kind = ErrorKind::kPlan) {
    Config config = config_with(folder, pattern(toml));
    expect_error(kind, {word}, [&] { check_training(config, 2); });
  };
  refused("{ kind = 'causal', documents = [50, 80] }", "136");
  refused("{ kind = 'dilated', segment_lengths = [8,8,8,8,8], dilation_rates = [1,1,1,1,1], combine = 'mean' }",
          "branches");
  refused("{ kind = 'dilated', segment_lengths = [100], dilation_rates = [1], equal_segments = true }", "segment");
  refused("{ kind = 'blocks', map = 'adaptive', keep = 2, documents = [50, 80] }", "136");
  refused("{ kind = 'blocks', map = 'file', file = '" + folder.path() + "/none' }", "none", ErrorKind::kInput);
  const std::string file = folder.path() + "/small.safetensors";
  const std::vector<uint8_t> active(4, 1);
  write_block_map(file, block_map_from_dense(active.data(), 16, 1, 1, 2, 2));
  refused("{ kind = 'blocks', map = 'file', block = 16, file = '" + file + "' }", "9");
}

}  // namespace
}  // namespace annulus::training_patterns_test
