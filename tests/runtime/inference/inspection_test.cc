// Tests of runtime/inference/inspection.h, which `annulus inspect` prints, for a folder and for a run: sizes, patterns,
// FLOPs and memory agree with the model's description and the memory plan.
#include "runtime/inference/inspection.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "common/error.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/huggingface/folders.h"
#include "tests/runtime/training/tiny_run.h"
#include "tests/runtime/training/trainer_runs.h"

namespace annulus::inspection_test {
namespace {

TEST(Inspection, InspectsAFolder) {
  const ModelShape shape = small_shape();
  const std::string folder = fresh_folder("inspected");
  nlohmann::ordered_json config = llama_config(shape);
  config["model_type"] = "qwen2";
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["use_sliding_window"] = true;
  config["sliding_window"] = 8;
  config["max_window_layers"] = 1;
  write_text(folder + "/config.json", config.dump());
  ModelShape with_biases = shape;
  with_biases.qkv_bias = true;
  write_weights(folder, weights_of(with_biases, at::kBFloat16));

  const Inspection of = inspect_model(folder, "runs", 64);
  EXPECT_FALSE(of.is_run);
  EXPECT_EQ(of.family, "qwen2");
  EXPECT_EQ(of.context, 256);
  EXPECT_TRUE(of.model.rope_fp32);
  EXPECT_EQ(of.parameters, parameter_count(with_biases));
  EXPECT_EQ(of.weight_bytes, 2 * of.parameters);
  EXPECT_EQ(of.dtypes, std::vector<std::string>{"BF16"});
  ASSERT_EQ(of.patterns.size(), 2U);
  EXPECT_EQ(of.patterns[0].text, "{ kind = \"causal\" }");
  EXPECT_EQ(of.patterns[1].layers, std::vector<int64_t>{1});
  // 64 queries have 1 + 2 + ... + 64 pairs in the first layer and 1 + ... + 7 + 57 * 8 in the second, times 4 heads.
  const double pairs = 4.0 * (64 * 65 / 2 + 28 + 57 * 8) / 64;
  EXPECT_DOUBLE_EQ(of.flops, flops_per_token(with_biases, pairs));
  EXPECT_EQ(of.attention_flops, 12 * 4 * pairs);  // all of these are multiples of 1/64
  EXPECT_EQ(inspect_model(folder, "runs", std::nullopt).length, 256);
  // The lasting memory is fp32 weights, gradients and both moments. A unit (a layer, the embedding, the output) ends at
  // a multiple of 16 elements, and so do its matrices together.
  const int64_t padding = 2 * 16 * (shape.layers + 2);
  EXPECT_GE(of.training.weights, 4 * of.parameters);
  EXPECT_LE(of.training.weights, 4 * (of.parameters + padding));
  EXPECT_GE(of.training.optimizer, 8 * of.parameters);
  EXPECT_LE(of.training.optimizer, 8 * (of.parameters + padding));
  EXPECT_GT(of.training.activations, 0);
}

TEST(Inspection, ErrorNamesTheMissingConfig) {
  const std::string folder = fresh_folder("unsaid");
  write_weights(folder, weights_of(small_shape(), at::kFloat));
  expect_error(ErrorKind::kInput, {folder + " has weights but no config.json"},
               [&] { inspect_model(folder, "runs", std::nullopt); });
}

TEST(Inspection, InspectsARun) {
  const TestFolder folder;
  Config config = tiny_config(folder);
  config.data.context.stages = {{.step = 0, .context = 32}, {.step = 3, .context = 128}};
  EXPECT_EQ(train(config, 2).code, 0);
  const std::string run = config.run.folder + "/tiny-001";
  const Inspection of = inspect_model("tiny", config.run.folder, std::nullopt);
  EXPECT_EQ(of.path, run);
  EXPECT_TRUE(of.is_run);
  EXPECT_EQ(of.family, "llama");
  EXPECT_FALSE(of.model.rope_fp32);
  EXPECT_EQ(of.context, 128);
  EXPECT_EQ(of.step, 6);
  EXPECT_EQ(of.weight_bytes, 4 * of.parameters);
  std::filesystem::remove_all(run + "/checkpoints");
  EXPECT_FALSE(inspect_model(run, "runs", std::nullopt).step);
  config = load_config(run + "/config.toml",
                       {"model.pattern={ kind = \"dilated\", segment_lengths = [32], dilation_rates = [2] }"});
  write_text(run + "/config.toml", to_toml(config));
  const Inspection dilated = inspect_model(run, "runs", 64);
  EXPECT_EQ(dilated.family, "");
  EXPECT_NE(dilated.no_family.find("dilated"), std::string::npos) << dilated.no_family;
  EXPECT_THROW(inspect_model(folder.path() + "/nothing", "runs", 64), Error);
}

}  // namespace
}  // namespace annulus::inspection_test
