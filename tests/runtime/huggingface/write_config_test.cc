// Tests of writing by runtime/huggingface/model_config.h: a written config.json reads back as the same model, in the
// family of the original or the simplest one that can express it.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "runtime/huggingface/model_config.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/huggingface/config_json.h"

namespace annulus::write_config_test {
namespace {

using namespace testing::config_json;  // NOLINT(google-build-using-namespace): what all of these tests use

ConfigToWrite to_write(const FolderConfig& from) {
  return {.model = from.model, .context = from.context, .original = from.text, .dtype = "bf16"};
}

Json written(const ConfigToWrite& config) { return Json::parse(write_model_config(config)); }

TEST(ModelConfig, WritesTheOriginalIfNothingChanged) {
  Json windows = with(qwen2(), "sliding_window", 64);
  windows["use_sliding_window"] = true;
  windows["max_window_layers"] = 1;
  const Json yarn = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 128}};
  for (const Json& config : {llama(), mistral(), qwen2(), qwen3(), windows, with(llama(), "rope_scaling", yarn),
                             with(llama(), "rope_parameters", yarn), smollm3(), gemma3()}) {
    EXPECT_EQ(written(to_write(read(config))), config);
  }
}

TEST(ModelConfig, WritesWhatTrainingChanged) {
  ConfigToWrite config = to_write(read(llama()));
  config.context = 8192;
  config.dtype = "fp32";
  config.model.rope_theta = 1e6;
  config.model.rope_scaling = {.kind = RotaryScaling::Kind::kYarn, .factor = 16, .original_context = 512};
  config.model.dropout = 0.125;
  const Json json = written(config);
  EXPECT_EQ(json["max_position_embeddings"], 8192);
  EXPECT_EQ(json["torch_dtype"], "float32");
  EXPECT_EQ(json["rope_theta"], 1e6);
  EXPECT_EQ(json["rope_scaling"]["rope_type"], "yarn");
  EXPECT_EQ(json["rope_scaling"]["original_max_position_embeddings"], 512);
  EXPECT_EQ(json["attention_dropout"], 0.125);
  EXPECT_EQ(json["id2label"], llama()["id2label"]) << "passed through";
  EXPECT_EQ(read(json).model.rope_scaling, config.model.rope_scaling);
}

// Layers with a window keep their own base, and layers without rotary positions are still without.
TEST(ModelConfig, WritesRotarySettingsByLayer) {
  const RotaryScaling yarn{.kind = RotaryScaling::Kind::kYarn, .factor = 16, .original_context = 512};
  ConfigToWrite config = to_write(read(gemma3()));
  config.model.rope_scaling = yarn;
  Json json = written(config);
  EXPECT_EQ(json["rope_scaling"]["rope_type"], "yarn");
  EXPECT_EQ(json["rope_local_base_freq"], 10000);
  EXPECT_EQ(read(json).model.rope_layers, config.model.rope_layers);
  EXPECT_EQ(read(json).model.rope_scaling, yarn);
  config.model.rope_layers.cycle[0].scaling = yarn;  // which only the newer format can say
  json = written(config);
  EXPECT_EQ(json["rope_parameters"]["sliding_attention"]["factor"], 16);
  EXPECT_EQ(read(json).model.rotary(2).scaling, yarn);
  config.model.rope_layers.cycle = {{}, {.own = true, .theta = 7}, {}, {}};
  expect_error(ErrorKind::kUsage, {"layer 3 rotates in a way of its own"}, [&] { write_model_config(config); });

  config = to_write(read(smollm3()));
  config.model.rope_theta = 7;
  config.model.rope_layers.cycle = {{.own = true, .scaling = none()}, {}, {}};
  json = written(config);
  EXPECT_EQ(json["no_rope_layers"], Json({0, 1, 1, 0}));
  EXPECT_EQ(json["rope_theta"], 7);
  config.model.rope_layers.cycle = {{.own = true, .theta = 3}, {}};
  expect_error(ErrorKind::kUsage, {"layer 1 rotates in a way of its own"}, [&] { write_model_config(config); });
  config = to_write(read(llama()));
  config.model.rope_layers.cycle = {{}, {.own = true, .scaling = none()}};
  expect_error(ErrorKind::kUsage, {"layer 1 has no rotary positions"}, [&] { write_model_config(config); });
}

// If the factor is null, it follows from the contexts; it is written out so that a changed context does not change it.
TEST(ModelConfig, ChangedContextKeepsTheScaling) {
  const Json yarn = {{"rope_type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 128}};
  ConfigToWrite config = to_write(read(with(llama(), "rope_parameters", yarn)));
  config.context = 4096;
  const Json json = written(config);
  EXPECT_EQ(json["rope_parameters"]["factor"], 4);
  EXPECT_EQ(json["rope_parameters"]["rope_theta"], 500000);
  EXPECT_FALSE(json.contains("rope_scaling"));
}

TEST(ModelConfig, WritesPatternsThatTheFamilyCanExpress) {
  const PatternSpec sliding = parse_pattern(window(63), "test"), full = causal_pattern();
  ConfigToWrite config = to_write(read(qwen2()));
  config.model.pattern = LayerPatterns({full, sliding, full, sliding});
  EXPECT_EQ(read(written(config)).model.pattern, config.model.pattern);
  EXPECT_EQ(written(config)["max_window_layers"], 4);
  config.model.pattern = LayerPatterns({full, full, sliding, sliding});
  EXPECT_EQ(written(config)["max_window_layers"], 2);

  config = to_write(read(llama()));
  config.model.pattern = sliding;
  expect_error(ErrorKind::kUsage, {"--leave-pattern"}, [&] { write_model_config(config); });
  config.leave_pattern = true;
  EXPECT_EQ(written(config), llama());
  config = to_write(read(mistral()));
  config.model.pattern = LayerPatterns({full, sliding, full, sliding});
  EXPECT_THROW(write_model_config(config), Error);
  config.model.pattern = parse_pattern("{ kind = \"dilated\", segment_lengths = [64], dilation_rates = [2] }", "test");
  EXPECT_THROW(write_model_config(config), Error);
}

TEST(ModelConfig, ChoosesTheSimplestFamilyForANewModel) {
  ModelSection m;
  m.layers = 2;
  m.dim = 64;
  m.heads = 4;
  m.kv_heads = 2;
  m.head_size = 16;
  m.ffn = 96;
  m.rope_scaling = {.kind = RotaryScaling::Kind::kLinear, .factor = 2};
  const PatternSpec sliding = parse_pattern(window(63), "test");
  const auto family = [](const ModelSection& model) {
    const FolderConfig read_again = read(written({.model = model, .context = 1024, .original = "", .dtype = "fp32"}));
    EXPECT_EQ(read_again.context, 1024);
    ModelSection same = read_again.model;
    same.rope_fp32 = model.rope_fp32;
    EXPECT_EQ(same, model);
    return read_again.family;
  };
  EXPECT_EQ(family(m), "llama");
  m.mlp_bias = true;
  EXPECT_EQ(family(m), "llama");
  m.mlp_bias = false;
  m.head_size = 32;
  EXPECT_EQ(family(m), "llama");
  m.pattern = sliding;
  EXPECT_EQ(family(m), "mistral");
  m.qkv_bias = true;
  m.pattern = LayerPatterns({sliding, causal_pattern()});
  EXPECT_EQ(family(m), "qwen2");
  m.qkv_bias = false;
  EXPECT_EQ(family(m), "smollm3");
  m.rope_layers.cycle = {{}, {.own = true, .scaling = none()}};
  EXPECT_EQ(family(m), "smollm3");
  m.qk_norm = true;
  EXPECT_THROW(family(m), Error) << "smollm3 has no norms of queries, and the others rotate in all layers";
  m.rope_layers.cycle.clear();
  EXPECT_EQ(family(m), "qwen3");
  m.mlp_bias = true;
  EXPECT_THROW(family(m), Error);
  m.mlp_bias = false;
  m.attention_sinks = true;
  EXPECT_THROW(family(m), Error) << "no family has sinks";
  m.attention_sinks = false;
  m.softcap = 50;
  EXPECT_THROW(family(m), Error) << "no family has a soft cap";
  m.softcap = 0;
  m.rope_layers.cycle = {{.own = true, .theta = 300}, {}};
  EXPECT_THROW(family(m), Error) << "only gemma3_text has another base where there is a window";
  m.activation = Activation::kGeluTanh;
  m.norm_zero_centered = m.post_norms = m.scale_embeddings = true;
  m.query_pre_attn_scalar = 20;
  EXPECT_EQ(family(m), "gemma3_text");
  m.query_pre_attn_scalar = 20.5;
  EXPECT_THROW(family(m), Error);
  m.query_pre_attn_scalar = 20;
  m.rope_layers.cycle[0].scaling = {.kind = RotaryScaling::Kind::kLinear, .factor = 2};
  EXPECT_EQ(family(m), "gemma3_text");
  for (bool ModelShape::*form : {&ModelShape::norm_zero_centered, &ModelShape::post_norms,
                                 &ModelShape::scale_embeddings, &ModelShape::qk_norm}) {
    ModelSection other = m;
    other.*form = false;
    EXPECT_THROW(family(other), Error);
  }
}

}  // namespace
}  // namespace annulus::write_config_test
