// The planned memory of a training step against what LibTorch's allocator hands out.
#include "runtime/memory_plan.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training.h"
#include "tests/runtime/peak_bytes.h"
#include "tests/runtime/tiny_run.h"

namespace annulus {
namespace {

struct Case {
  const char* name;
  int64_t layers, dim, heads, kv_heads, ffn, vocab, context, batch;
};

Config config_of(const TestFolder& folder, const Case& c) {
  Config config = tiny_config(folder);
  config.model.layers = c.layers;
  config.model.dim = c.dim;
  config.model.heads = c.heads;
  config.model.kv_heads = c.kv_heads;
  config.model.ffn = c.ffn;
  config.model.vocab = c.vocab;
  config.data.context = c.context;
  config.data.batch = c.batch;
  config.data.validation_fraction = 0;
  return config;
}

// On each rank. Of the second step: the first takes what lasts.
std::vector<int64_t> peaks_of_a_step(const Config& config, int ranks) {
  const TextSource text(config.data, config.run.seed);
  std::vector<int64_t> peaks(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Communicator& world) {
    const auto bytes = std::make_shared<PeakBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
    Training training(config, world, text, at::kCPU);
    training.step();
    training.step();
    peaks[static_cast<size_t>(world.rank())] = bytes->peak();
  });
  return peaks;
}

void expect_planned(const Config& config, int ranks, const std::string& what) {
  const std::vector<int64_t> peaks = peaks_of_a_step(config, ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    const MemoryPlan plan = plan_memory(config, check_training(config, ranks), ranks, rank, /*gpu=*/false);
    const double ratio = static_cast<double>(peaks[static_cast<size_t>(rank)]) / static_cast<double>(plan.total());
    EXPECT_GT(ratio, 1 / 1.1) << what << ", rank " << rank << ": " << plan.text();
    EXPECT_LT(ratio, 1.1) << what << ", rank " << rank << ": " << plan.text();
    ::testing::Test::RecordProperty(what + ", rank " + std::to_string(rank), std::to_string(ratio));
  }
}

TEST(MemoryPlan, IsWhatAStepTakes) {
  const TestFolder folder;
  for (const Case& c :
       {Case{"wide", 4, 64, 2, 2, 256, 256, 512, 2}, Case{"grouped", 6, 64, 4, 1, 160, 256, 1024, 1},
        Case{"large vocabulary", 2, 32, 2, 2, 96, 4096, 256, 4}, Case{"long", 3, 64, 2, 1, 128, 256, 2048, 1}}) {
    for (const std::string dtype : {"fp32", "bf16"}) {
      for (const bool recompute : {false, true}) {
        Config config = config_of(folder, c);
        config.model.dtype = dtype;
        config.model.recompute = recompute;
        expect_planned(config, 1, std::string(c.name) + ", " + dtype + (recompute ? ", recomputed" : ""));
      }
    }
  }
}

TEST(MemoryPlan, CountsWhatTravels) {
  const TestFolder folder;
  for (const std::string schedule : {"ring", "all-gather"}) {
    for (const bool recompute : {false, true}) {
      Config config = config_of(folder, {"", 6, 64, 2, 1, 192, 256, 2048, 1});
      config.attention.schedule = schedule;
      config.model.recompute = recompute;
      for (const int ranks : {2, 4}) {
        expect_planned(config, ranks, schedule + " over " + std::to_string(ranks) + (recompute ? ", recomputed" : ""));
      }
    }
  }
}

// Where the MLP is small, what attention holds of other ranks is the most.
TEST(MemoryPlan, CountsWhatAttentionHolds) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16"}) {
    Config config = config_of(folder, {"", 2, 64, 2, 2, 32, 256, 2048, 1});
    config.attention.schedule = "all-gather";
    config.model.recompute = true;
    config.model.dtype = dtype;
    const MemoryPlan plan = plan_memory(config, check_training(config, 4), 4, 0, /*gpu=*/false);
    EXPECT_EQ(plan.working(), plan.attention);
    EXPECT_GT(plan.attention, 2 * plan.layer);
    expect_planned(config, 4, dtype + ", attention");
  }
}

// Nothing is taken for a model that no machine here could hold.
TEST(MemoryPlan, OfAModelOfABillionWeights) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 16, 2048, 32, 8, 8192, 32768, 32768, 1});
  config.model.dtype = "bf16";
  const MemoryPlan kept = plan_memory(config, check_training(config, 1), 1, 0, /*gpu=*/true);
  const int64_t count = parameter_count(model_shape(config));
  EXPECT_EQ(kept.weights + kept.gradients + kept.optimizer + kept.leaves, 20 * count);
  EXPECT_NE(kept.text().find(" GB a rank planned: weights "), std::string::npos) << kept.text();
  config.model.recompute = true;
  const MemoryPlan recomputed = plan_memory(config, check_training(config, 1), 1, 0, /*gpu=*/true);
  EXPECT_LT(recomputed.activations, kept.activations / 3) << recomputed.text() << "; " << kept.text();
  RecordProperty("kept", kept.text());
  RecordProperty("recomputed", recomputed.text());
}

}  // namespace
}  // namespace annulus
