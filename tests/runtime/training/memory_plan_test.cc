// Tests of runtime/training/memory_plan.h: the planned memory of a training step is compared with what LibTorch's
// allocator hands out.
#include "runtime/training/memory_plan.h"

#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/tensor_files/safetensors.h"
#include "runtime/training/mask_bits.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/training/step_memory.h"

namespace annulus::memory_plan_test {
namespace {

// Where tests run through three settings, each two values of different settings meet, and the third is taken in turn.
const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp64"};

TEST(MemoryPlan, PredictsWhatAStepAllocates) {
  const TestFolder folder;
  bool recompute = false;
  for (const Case& c :
       {Case{"wide", 4, 64, 2, 2, 256, 256, 512, 2}, Case{"grouped", 6, 64, 4, 1, 160, 256, 1024, 1},
        Case{"large vocabulary", 2, 32, 2, 2, 96, 4096, 256, 4}, Case{"long", 3, 64, 2, 1, 128, 256, 2048, 1}}) {
    for (const std::string& dtype : kDtypes) {
      Config config = config_of(folder, c);
      config.model.dtype = dtype;
      config.model.recompute = recompute;
      expect_planned(config, 1, std::string(c.name) + ", " + dtype + (recompute ? ", recomputed" : ""));
      recompute = !recompute;
    }
  }
}

// An MLP so wide that rows are computed in tiles: 128 rows of 2 x 16384 elements fill a tile in fp32.
TEST(MemoryPlan, CountsTiles) {
  const TestFolder folder;
  for (const auto& [dtype, recompute] :
       {std::pair<std::string, bool>{"fp32", false}, {"fp32", true}, {"bf16", true}, {"fp64", false}}) {
    Config config = config_of(folder, {"", 2, 64, 2, 1, 16384, 256, 512, 2});
    config.model.qk_norm = true;
    config.model.dtype = dtype;
    config.model.recompute = recompute;
    expect_planned(config, 1, "tiles, " + dtype + (recompute ? ", recomputed" : ""));
  }
}

// What is offloaded is on the device beside the next layer only. The plan says how many bytes the file holds.
TEST(MemoryPlan, CountsWhatIsOffloaded) {
  const TestFolder folder;
  for (const auto& [dtype, on_device] :
       {std::pair<std::string, int64_t>{"fp32", 0}, {"fp32", 1}, {"fp32", 3}, {"bf16", 1}, {"fp64", 0}}) {
    Config config = config_of(folder, {"", 12, 64, 4, 2, 64, 256, 2048, 1});
    config.model.dtype = dtype;
    config.model.recompute = true;
    config.memory.offload = "file";
    config.memory.files = folder.path();
    config.memory.device_layers = on_device;
    for (const int ranks : {1, 2}) {
      expect_planned(config, ranks, dtype + ", " + std::to_string(on_device) + " layers on the device");
    }
  }
}

// With optimizer.offload the device has neither moments nor master weights, but the buffers of some chunks. The plan
// says how many bytes the file holds and an update moves.
TEST(MemoryPlan, CountsTheOptimizersStateInATier) {
  const TestFolder folder;
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    for (const int64_t level : {0, 1, 2, 3}) {
      Config config = config_of(folder, {"", 12, 64, 4, 2, 256, 256, 256, 2});
      config.model.dtype = kDtypes[i];
      config.optimizer.shard = level;
      config.memory.files = folder.path();
      const auto lasting = [&] {
        return plan_memory(config, check_training(config, 2), make_sharding(config, 2, 2), 2, 0, RanksAre::kThreads)
            .step;
      };
      const StepCharges without = lasting();
      config.optimizer.offload = "file";
      const StepCharges with = lasting();
      EXPECT_LT(with.lasting("weights") + with.lasting("optimizer"),
                without.lasting("weights") + without.lasting("optimizer"));
      expect_planned(config, (static_cast<int>(i) + static_cast<int>(level)) % 2 + 1,
                     kDtypes[i] + ", level " + std::to_string(level));
    }
  }
}

// Some model families set the head size, norms of queries and keys, and biases.
TEST(MemoryPlan, CountsHeadSizeNormsAndBiases) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    for (const bool recompute : {false, true}) {
      Config config = config_of(folder, {"", 4, 64, 4, 2, 160, 256, 1024, 1});
      config.model.head_size = 32;
      config.model.qk_norm = config.model.qkv_bias = config.model.out_bias = config.model.mlp_bias = true;
      config.model.attention_sinks = recompute ? LayerSwitch({true, false, false}) : LayerSwitch(true);
      config.model.softcap = 20;
      config.model.dtype = dtype;
      config.model.recompute = recompute;
      expect_planned(config, 1, "rich, " + dtype + (recompute ? ", recomputed" : ""));
    }
  }
}

// Others have norms of what is added to the residual stream, several rotary tables and scaled embeddings.
TEST(MemoryPlan, CountsPostNormsAndRotaryTables) {
  const TestFolder folder;
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    for (const bool recompute : {false, true}) {
      for (const int64_t ffn : {64, 160, 16384}) {
        if (ffn > 160 && (i > 0 || !recompute)) continue;  // computed in tiles: CountsTiles has the rest
        if (ffn == ((i % 2 == 0) == recompute ? 64 : 160)) continue;
        const std::string& dtype = kDtypes[i];
        Config config = config_of(folder, {"", 4, 64, 4, 2, ffn, 256, ffn > 160 ? 512 : 1024, 1});
        config.model.post_norms = config.model.norm_zero_centered = config.model.scale_embeddings = true;
        config.model.activation = Activation::kGeluTanh;
        config.model.rope_layers.cycle = {
            {.own = true, .theta = 300}, {}, {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}}};
        config.model.dtype = dtype;
        config.model.recompute = recompute;
        expect_planned(config, 1,
                       "post norms, " + dtype + (recompute ? ", recomputed" : "") + ", MLP " + std::to_string(ffn));
      }
    }
  }
}

TEST(MemoryPlan, CountsCommunicationBuffers) {
  const TestFolder folder;
  int ranks = 2;
  for (const std::string schedule : {"ring", "all-gather", "ulysses", "mesh"}) {
    ranks = 6 - ranks;
    for (const bool recompute : {false, true}) {
      Config config = config_of(folder, {"", 6, 64, 2, 1, 192, 256, 2048, 1});
      config.attention.schedule = schedule;
      config.attention.within = schedule == "ulysses" ? 2 : 0;
      config.model.recompute = recompute;
      expect_planned(config, ranks, schedule + " over " + std::to_string(ranks) + (recompute ? ", recomputed" : ""));
      ranks = 6 - ranks;
    }
  }
}

// Ranks that lend their blocks hold together what is planned for all of them: a block that the plan counts for the
// borrower lies in the memory of its owner.
TEST(MemoryPlan, LentBlocksTakeTheMemoryThatCopiesWouldTake) {
  const TestFolder folder;
  for (const std::string schedule : {"ring", "all-gather"}) {
    Config config = config_of(folder, {"", 6, 64, 2, 1, 192, 256, 2048, 1});
    config.attention.schedule = schedule;
    for (const int ranks : {2, 4}) {
      const std::vector<Taken> lent = taken_by_a_step(config, ranks, /*lending=*/true);
      int64_t kept = 0, peak = 0, planned_kept = 0, planned_peak = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const MemoryPlan plan = plan_memory(config, check_training(config, ranks), make_sharding(config, ranks, ranks),
                                            ranks, rank, RanksAre::kThreads);
        kept += lent[static_cast<size_t>(rank)].kept, planned_kept += plan.step.kept();
        peak += lent[static_cast<size_t>(rank)].peak, planned_peak += plan.total();
      }
      const std::string where = schedule + " over " + std::to_string(ranks);
      EXPECT_LE(static_cast<double>(kept), 1.05 * static_cast<double>(planned_kept)) << where;
      EXPECT_LE(static_cast<double>(peak), 1.05 * static_cast<double>(planned_peak)) << where;
      RecordProperty(where, std::to_string(static_cast<double>(kept) / static_cast<double>(planned_kept)) + ", " +
                                std::to_string(static_cast<double>(peak) / static_cast<double>(planned_peak)));
    }
  }
}

// Accumulated batches, rows read ahead, and the table of positions of each row are counted.
TEST(MemoryPlan, CountsAccumulatedBatchesAndPositions) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    Config config = config_of(folder, {"", 1, 32, 2, 1, 32, 256, 512, 4});
    config.model.dtype = dtype;
    config.data.accumulate = 4;
    expect_planned(config, 1, dtype + ", accumulated");
    config.data.documents = true;
    config.data.positions = "restart";
    config.attention.schedule = "ring";  // auto may choose another one for documents, which keeps more but holds less
    expect_planned(config, 1, dtype + ", restarted positions");
    expect_planned(config, 2, dtype + ", restarted positions");
  }
}

// A plane of the weights lies beside the tokens and the targets.
TEST(MemoryPlan, CountsWeightsOfTargets) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 2, 32, 2, 1, 64, 256, 2048, 4});
  std::vector<float> weights(20000, 1);
  for (size_t i = 0; i < weights.size(); i += 3) weights[i] = 2;
  const std::string path = folder.path() + "/weighted.tokens";
  put_file(path, annulus_shard({Ids(20000, 7)}, 2, 256, std::string(16, '\x5a'), weights));
  config.data.train = {path};
  config.data.validation_fraction = 0;
  config.data.accumulate = 2;
  for (const std::string positions : {"running", "restart"}) {
    config.data.positions = positions;
    for (const int ranks : {1, 2}) expect_planned(config, ranks, "weights, positions " + positions);
  }
}

TEST(MemoryPlan, BatchRampIsPlannedForItsLargestStep) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 2, 64, 2, 2, 96, 256, 512, 4});
  for (const int64_t level : {0, 2}) {
    config.optimizer.shard = level;
    const auto total = [&] {
      return plan_memory(config, check_training(config, 2), make_sharding(config, 2, 2), 2, 0, RanksAre::kThreads)
          .total();
    };
    config.data.accumulate = 4;
    const int64_t alone = total();
    config.data.accumulate.stages = {{.step = 0, .batches = 1}, {.step = 3, .batches = 4}, {.step = 9, .batches = 2}};
    EXPECT_EQ(total(), alone) << level;
  }
}

TEST(MemoryPlan, ContextScheduleIsPlannedForItsLargestStage) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 2, 64, 2, 2, 96, 256, 512, 4});
  const MemoryPlan alone = plan_memory(config, check_training(config, 1), {}, 1, 0, RanksAre::kThreads);
  config.data.context.stages = {{.step = 0, .context = 64}, {.step = 5, .context = 512}, {.step = 9, .context = 128}};
  EXPECT_EQ(plan_memory(config, check_training(config, 1), {}, 1, 0, RanksAre::kThreads).total(), alone.total());
  EXPECT_EQ(least_memory(config, {}, 1), least_memory(config_of(folder, {"", 2, 64, 2, 2, 96, 256, 512, 4}), {}, 1));
}

// At every level the lasting memory and the peak are planned, including the buffers of gathers and sums. Each dtype and
// level meets both values of the other three settings, and each pair of settings all of its values.
TEST(MemoryPlan, CountsTheStateAtEachShardingLevel) {
  const TestFolder folder;
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    for (const size_t accumulate : {1, 2}) {
      for (const size_t level : {0, 1, 2, 3}) {
        const bool tied = (accumulate + level) % 2 == 0, recompute = (accumulate + i) % 2 == 0;
        Config config = config_of(folder, {"", 5, 96, 2, 1, 256, tied ? 1024 : 256, 256, 2});
        config.model.dtype = kDtypes[i];
        config.model.tie_embeddings = tied;
        config.model.recompute = recompute;
        config.data.accumulate = static_cast<int64_t>(accumulate);
        config.optimizer.shard = static_cast<int64_t>(level);
        expect_planned(config, 2,
                       "level " + std::to_string(level) + ", " + kDtypes[i] + (tied ? ", tied" : "") +
                           (recompute ? ", recomputed" : "") + ", accumulate " + std::to_string(accumulate),
                       1.05);
      }
    }
  }
}

// When the model gets deeper, a rank's memory grows only by its share of the additional layers.
TEST(MemoryPlan, AtLevel3GrowsOnlyByTheRanksShare) {
  const TestFolder folder;
  const auto config = [&](int64_t layers) {
    Config c = config_of(folder, {"", layers, 128, 2, 2, 384, 256, 64, 1});
    c.optimizer.shard = 3;
    c.model.recompute = true;
    return c;
  };
  const auto peak = [&](int64_t layers) {
    int64_t most = 0;
    for (const Taken& rank : taken_by_a_step(config(layers), 4)) most = std::max(most, rank.peak);
    return most;
  };
  const auto kept = [&](int64_t layers) {
    const Config c = config(layers);
    return plan_memory(c, check_training(c, 4), make_sharding(c, 4, 4), 4, 0, RanksAre::kThreads).step.kept();
  };
  const int64_t grown = peak(24) - peak(8);
  // A rank's share is a quarter of each fp32 weight, of its gradient and of its two means, and its kept activations.
  const auto share = static_cast<double>(16 * (4 * 128 * 128 + 3 * 128 * 384 + 2 * 128) * 4 + kept(24) - kept(8));
  RecordProperty("bytes more, and its share", std::to_string(grown) + ", " + std::to_string(share));
  EXPECT_NEAR(static_cast<double>(grown), share, 0.02 * share);
}

// On CPUs dropout takes no more memory than attention without it. The MLP is small so that attention has the peak.
TEST(MemoryPlan, CountsDropout) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    Config config = config_of(folder, {"", 2, 64, 4, 2, 32, 256, 1024, 1});
    config.model.dropout = 0.1;
    config.model.dtype = dtype;
    expect_planned(config, 1, dtype + ", dropout");
    expect_planned(config, 2, dtype + ", dropout");
  }
}

TEST(MemoryPlan, CountsBlockSelection) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 1, 64, 2, 2, 32, 256, 4096, 1});
  config.model.pattern.all =
      parse_pattern("{ kind = 'blocks', block = 16, causal = true, map = 'adaptive', keep = 4 }", "test");
  expect_planned(config, 1, "selected blocks");
}

// With a small MLP, the rows of other ranks that attention holds make the peak.
TEST(MemoryPlan, CountsAttentionBuffers) {
  const TestFolder folder;
  for (const std::string dtype : {"fp32", "bf16", "fp64"}) {
    Config config = config_of(folder, {"", 2, 64, 2, 2, 32, 256, 2048, 1});
    config.attention.schedule = "all-gather";
    config.model.recompute = true;
    config.model.dtype = dtype;
    const MemoryPlan plan =
        plan_memory(config, check_training(config, 4), make_sharding(config, 4, 4), 4, 0, RanksAre::kThreads);
    EXPECT_EQ(plan.step.most().part, kAttentionPart);
    EXPECT_TRUE(plan.step.most().backward);
    // More than twice what the MLP takes besides what lasts and is kept.
    const int64_t other = plan.step.lasting() + plan.step.kept();
    EXPECT_GT(plan.total() - other, 2 * (plan.step.most_in_backward_of("MLP") - other));
    expect_planned(config, 4, dtype + ", attention");
  }
}

// The bits of a mask lie on each rank, and once more those of its rows.
// Of the pairs of two rows that differ.
std::vector<uint8_t> two_masks() {
  std::vector<uint8_t> shown(2 * 512 * 512, 1);
  for (size_t i = 0; i < shown.size(); i += 3) shown[i] = 0;
  return shown;
}

TEST(MemoryPlan, CountsMasksOfTokens) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 3, 64, 2, 1, 128, 256, 512, 2});
  const auto lasting = [&] {
    const MemoryPlan plan = plan_memory(config, check_training(config, 2), {}, 2 / static_cast<int>(config.mesh.data),
                                        0, RanksAre::kProcesses);
    return plan.step.lasting("masks of tokens");
  };
  EXPECT_EQ(lasting(), 0);
  const std::vector<uint8_t> shown = two_masks();
  const auto mask = std::make_shared<const TokenMask>(token_mask_from_dense(shown.data(), 2, 1, 512, 512));
  config.model.pattern.all.mask = given_mask(mask);
  EXPECT_EQ(lasting(), mask->bytes());
  EXPECT_GT(mask->bytes(), 2 * 512 * 512 / 8);
  // A list has the mask once.
  config.model.pattern.each = {config.model.pattern.all, causal_pattern(), config.model.pattern.all};
  EXPECT_EQ(lasting(), mask->bytes());
  config.mesh.data = 2;
  EXPECT_GT(lasting(), mask->bytes());  // the mask of the rank's rows shares the bits
  EXPECT_LT(lasting(), mask->bytes() + 512 * 512 / 8);
  EXPECT_EQ(plan_memory(config, check_training(config, 2), {}, 1, 0, RanksAre::kGpus).step.lasting("masks of tokens"),
            0);
}

TEST(MemoryPlan, CountsTheBitsOfAFilesMaskThatARankHolds) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 3, 64, 2, 1, 128, 256, 512, 2});
  std::vector<uint8_t> shown = two_masks();
  const auto mask = std::make_shared<const TokenMask>(token_mask_from_dense(shown.data(), 2, 1, 512, 512));
  const std::string path = folder.path() + "/mask.safetensors";
  write_safetensors(path, {{"mask", at::from_blob(shown.data(), {2, 1, 512, 512}, at::kByte)}});
  config.model.pattern.all = parse_pattern("{ kind = 'causal', mask = '" + path + "' }", "test");
  for (const int ranks : {1, 2}) {
    const std::vector<Stage> stages = check_training(config, ranks);
    EXPECT_TRUE(stages[0].layers.distinct[0].pattern.mask.given->stored->words.empty());
    for (int rank = 0; rank < ranks; ++rank) {
      LayerRequests own = stages[0].layers;
      hold_bits(config, own, Span::range(0, 2), rank);
      const TokenMask& held = *own.distinct[0].pattern.mask.given;
      EXPECT_EQ(held.held, needed_bits(own.distinct[0], rank));
      EXPECT_EQ(held.stored->words.size(), mask->stored->words.size() / static_cast<size_t>(ranks));
      EXPECT_EQ(plan_memory(config, stages, {}, ranks, rank, RanksAre::kProcesses).step.lasting("masks of tokens"),
                held.bytes());
    }
  }
  // Of a batch that data-parallel ranks share, those of its rows alone; the mask of these rows shares them.
  config.mesh.data = 2;
  std::vector<Stage> stages = check_training(config, 2);
  hold_bits(config, stages[0].layers, {1, 1, 1}, 0);
  const TokenMask& of_row = *stages[0].layers.distinct[0].pattern.mask.given;
  EXPECT_EQ(of_row.stored->words.size(), mask->stored->words.size() / 2);
  EXPECT_EQ(of_row.bits(of_row.plane_of[0], 7, 0).words, nullptr);
  EXPECT_NE(of_row.bits(of_row.plane_of[1], 7, 0).words, nullptr);
  EXPECT_EQ(
      plan_memory(config, check_training(config, 2), {}, 1, 0, RanksAre::kProcesses).step.lasting("masks of tokens"),
      of_row.bytes() + of_row.of_batch_rows(1, 1).bytes_holding({}));
  config.mesh.data = 1;
  // Ranks that compute queries of others hold the bits of these, too, here of all.
  config.attention.schedule = "ulysses";
  for (const int rank : {0, 1}) {
    LayerRequests own = check_training(config, 2)[0].layers;
    hold_bits(config, own, Span::range(0, 2), rank);
    EXPECT_EQ(own.distinct[0].pattern.mask.given->stored->words.size(), mask->stored->words.size());
  }
  // So do those whose layout follows the documents of each batch. memory.masks bounds them as well.
  config.attention.schedule = "ring";
  config.attention.layout = "balanced";
  config.data.documents = true;
  stages = check_training(config, 2);
  hold_bits(config, stages[0].layers, Span::range(0, 2), 0);
  const TokenMask& of_any_layout = *stages[0].layers.distinct[0].pattern.mask.given;
  EXPECT_EQ(of_any_layout.stored->words.size(), mask->stored->words.size());
  EXPECT_EQ(
      plan_memory(config, check_training(config, 2), {}, 2, 0, RanksAre::kProcesses).step.lasting("masks of tokens"),
      of_any_layout.bytes());
  config.memory.masks = 0;
  expect_error(ErrorKind::kResource, {"the mask in " + path, "on this rank", "memory.masks"},
               [&] { check_training(config, 2); });
  set_mask_limit(int64_t{1} << 30);
}

// Planning allocates nothing, so that a model too large for this machine can be planned.
TEST(MemoryPlan, PlansABillionWeightsWithoutAllocating) {
  const TestFolder folder;
  Config config = config_of(folder, {"", 16, 2048, 32, 8, 8192, 32768, 32768, 1});
  config.model.dtype = "bf16";
  const MemoryPlan kept = plan_memory(config, check_training(config, 1), {}, 1, 0, RanksAre::kGpus);
  // In bf16 a parameter has fp32 weights, two means and summed gradients, and bf16 leaves and gradients of them.
  const int64_t count = parameter_count(model_shape(config));
  EXPECT_EQ(kept.step.lasting("weights"), 6 * count);
  EXPECT_EQ(kept.step.lasting("gradients"), 6 * count);
  EXPECT_EQ(kept.step.lasting("optimizer"), 8 * count);
  EXPECT_NE(kept.text().find(" GB planned for each rank: weights "), std::string::npos) << kept.text();
  config.model.recompute = true;
  const MemoryPlan recomputed = plan_memory(config, check_training(config, 1), {}, 1, 0, RanksAre::kGpus);
  EXPECT_LT(recomputed.step.kept(), kept.step.kept() / 3) << recomputed.text() << "; " << kept.text();
  RecordProperty("kept", kept.text());
  RecordProperty("recomputed", recomputed.text());
}

}  // namespace
}  // namespace annulus::memory_plan_test
