// Tests of reading by runtime/huggingface/model_config.h: the config.json of each family is read as the model that
// transformers would build; an unsupported setting is refused by its key.
#include "runtime/huggingface/model_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "tests/runtime/huggingface/config_json.h"

namespace annulus::model_config_test {
namespace {

using namespace testing::config_json;  // NOLINT(google-build-using-namespace): what all of these tests use

// The message of the error that reading the text throws, or "nothing".
std::string refusal_of_text(const std::string& text) {
  try {
    parse_folder_config(text, "model/config.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << error.what();
    return std::string(error.message());
  }
  return "nothing";
}
std::string refusal(const Json& config) { return refusal_of_text(config.dump()); }

void expect_refusal(const Json& config, const std::string& key) {
  const std::string said = refusal(config);
  EXPECT_NE(said.find("model/config.json: \"" + key + "\""), std::string::npos) << key << ": " << said;
}

TEST(ModelConfig, ReadsSizes) {
  const FolderConfig config = read(llama());
  const ModelSection& m = config.model;
  EXPECT_EQ(config.family, "llama");
  EXPECT_EQ(config.context, 512);
  EXPECT_EQ(config.dtype, "bfloat16");
  EXPECT_EQ(m.dim, 64);
  EXPECT_EQ(m.layers, 4);
  EXPECT_EQ(m.heads, 4);
  EXPECT_EQ(m.kv_heads, 2);
  EXPECT_EQ(m.head_size, 16);
  EXPECT_EQ(m.ffn, 96);
  EXPECT_EQ(m.vocab, 320);
  EXPECT_EQ(m.rope_theta, 500000);
  EXPECT_EQ(m.norm_eps, 1e-5);
  EXPECT_EQ(m.dtype, "bf16");
  EXPECT_TRUE(m.rope_fp32);
  EXPECT_FALSE(m.tie_embeddings || m.qkv_bias || m.out_bias || m.mlp_bias || m.qk_norm);
  EXPECT_EQ(m.pattern, LayerPatterns());
  EXPECT_EQ(m.rope_scaling, RotaryScaling());
}

TEST(ModelConfig, DefaultsMatchTransformers) {
  const auto without = [](Json config, std::initializer_list<const char*> keys) {
    for (const char* key : keys) config.erase(key);
    return config;
  };
  const ModelSection m = read(without(llama(), {"num_key_value_heads", "rms_norm_eps", "rope_theta"})).model;
  EXPECT_EQ(m.kv_heads, 4);
  EXPECT_EQ(m.norm_eps, 1e-6);
  EXPECT_EQ(m.rope_theta, 10000);
  Json many = without(mistral(), {"num_key_value_heads"});
  many["num_attention_heads"] = 16;
  EXPECT_EQ(read(many).model.kv_heads, 8);
  EXPECT_EQ(read(with(many, "num_key_value_heads", nullptr)).model.kv_heads, 16);
  EXPECT_EQ(read(mistral()).model.pattern.all.text(), window(4095));
  EXPECT_EQ(read(qwen3()).model.head_size, 128);
  EXPECT_EQ(read(qwen2()).model.head_size, 16);
  const ModelSection smol = read(without(smollm3(), {"num_key_value_heads", "rope_theta"})).model;
  EXPECT_EQ(smol.kv_heads, 4);
  EXPECT_EQ(smol.rope_theta, 2e6);
  EXPECT_TRUE(smol.tie_embeddings);
  const ModelSection gemma =
      read(without(gemma3(), {"num_key_value_heads", "rope_theta", "sliding_window", "sliding_window_pattern"})).model;
  EXPECT_EQ(gemma.kv_heads, 4);
  EXPECT_EQ(gemma.head_size, 256);
  EXPECT_EQ(gemma.rope_theta, 1e6);
  EXPECT_EQ(gemma.query_pre_attn_scalar, 256);
  EXPECT_TRUE(gemma.tie_embeddings);
  EXPECT_EQ(gemma.pattern.text(), window(4095)) << "the first layer without a window would be the sixth";
}

TEST(ModelConfig, ReadsBiasesNormsAndHeadSizes) {
  ModelSection m = read(with(with(llama(), "attention_bias", true), "mlp_bias", true)).model;
  EXPECT_TRUE(m.qkv_bias && m.out_bias && m.mlp_bias);
  m = read(qwen2()).model;
  EXPECT_TRUE(m.qkv_bias && !m.out_bias && !m.mlp_bias && !m.qk_norm);
  m = read(with(qwen3(), "head_dim", 32)).model;
  EXPECT_TRUE(m.qk_norm && !m.qkv_bias && !m.out_bias);
  EXPECT_EQ(m.head_dim(), 32);
  EXPECT_TRUE(read(with(qwen3(), "attention_bias", true)).model.out_bias);
  EXPECT_TRUE(read(with(llama(), "tie_word_embeddings", true)).model.tie_embeddings);
  EXPECT_EQ(read(with(llama(), "attention_dropout", 0.25)).model.dropout, 0.25);
  EXPECT_EQ(read(with(llama(), "torch_dtype", "float16")).model.dtype, "fp32");
  EXPECT_EQ(read(with(llama(), "dtype", "float32")).model.dtype, "fp32");  // the newer key takes precedence
}

TEST(ModelConfig, WindowsAndLayerTypesBecomePatterns) {
  EXPECT_EQ(read(with(mistral(), "sliding_window", 128)).model.pattern.text(), window(127));
  EXPECT_EQ(read(with(mistral(), "sliding_window", nullptr)).model.pattern, LayerPatterns());

  Json config = with(qwen2(), "sliding_window", 64);
  config["max_window_layers"] = 1;
  EXPECT_EQ(read(config).model.pattern, LayerPatterns()) << "use_sliding_window is missing";
  config["use_sliding_window"] = true;
  const PatternSpec full = causal_pattern(), sliding = parse_pattern(window(63), "test");
  EXPECT_EQ(read(config).model.pattern, LayerPatterns({full, sliding, sliding, sliding}));
  config["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention", "full_attention"};
  EXPECT_EQ(read(config).model.pattern, LayerPatterns({sliding, full, sliding, full}));
  config["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"};
  EXPECT_EQ(read(config).model.pattern, LayerPatterns(sliding));
  expect_refusal(with(config, "use_sliding_window", false), "layer_types");
  expect_refusal(with(config, "sliding_window", nullptr), "layer_types");
  expect_refusal(with(config, "layer_types", {"full_attention"}), "layer_types");
  expect_refusal(with(config, "layer_types", Json::array({"full_attention", "conv", "conv", "conv"})), "layer_types");
  expect_refusal(with(config, "sliding_window", 0), "sliding_window");
}

TEST(ModelConfig, ReadsLayersWithoutRotaryPositions) {
  const auto rotates = [](const Json& config) {
    const ModelSection m = read(config).model;
    std::string text;
    for (int64_t i = 0; i < m.layers; ++i) {
      const RotarySpec spec = m.rotary(i);
      text += spec.scaling == none() ? "0" : "1";
      EXPECT_TRUE(spec.scaling == none() || spec == m.rotary());
    }
    return text;
  };
  EXPECT_EQ(rotates(smollm3()), "1110") << "every fourth";
  EXPECT_EQ(read(smollm3()).model.rope_layers.text(), "[{}, {}, {}, { kind = \"none\" }]");
  EXPECT_EQ(rotates(with(smollm3(), "no_rope_layer_interval", 2)), "1010");
  EXPECT_EQ(read(with(smollm3(), "no_rope_layer_interval", 2)).model.rope_layers.text(), "[{}, { kind = \"none\" }]");
  EXPECT_EQ(rotates(with(smollm3(), "no_rope_layers", {0, 1, 1, 0, 0})), "0110") << "transformers reads the first ones";
  EXPECT_TRUE(read(with(smollm3(), "no_rope_layers", {1, 1, 1, 1})).model.rope_layers.cycle.empty());
  // Without layer_types, these layers have the window.
  const PatternSpec full = causal_pattern(), sliding = parse_pattern(window(63), "test");
  Json windows = with(with(smollm3(), "sliding_window", 64), "use_sliding_window", true);
  windows["no_rope_layer_interval"] = 2;
  EXPECT_EQ(read(windows).model.pattern, LayerPatterns({full, sliding, full, sliding}));
  windows["layer_types"] = {"sliding_attention", "full_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(read(windows).model.pattern, LayerPatterns({sliding, full, full, sliding}));
  EXPECT_EQ(rotates(windows), "1010");
  expect_refusal(with(smollm3(), "no_rope_layers", {1, 0}), "no_rope_layers");
  expect_refusal(with(smollm3(), "no_rope_layers", {1, 0, 2, 1}), "no_rope_layers");
  expect_refusal(with(smollm3(), "no_rope_layer_interval", 0), "no_rope_layer_interval");
  expect_refusal(with(llama(), "no_rope_layers", {1, 1, 1, 1}), "no_rope_layers");
  expect_refusal(with(llama(), "no_rope_layer_interval", 4), "no_rope_layer_interval");
}

TEST(ModelConfig, ReadsTheFormsOfGemma) {
  const ModelSection m = read(gemma3()).model;
  EXPECT_TRUE(m.norm_zero_centered && m.post_norms && m.scale_embeddings && m.qk_norm);
  EXPECT_EQ(m.activation, Activation::kGeluTanh);
  EXPECT_EQ(read(with(gemma3(), "query_pre_attn_scalar", 168)).model.query_pre_attn_scalar, 168);
  const PatternSpec full = causal_pattern(), sliding = parse_pattern(window(63), "test");
  EXPECT_EQ(m.pattern, LayerPatterns({sliding, full, sliding, full}));
  EXPECT_EQ(m.rope_layers.text(), "[{ kind = \"default\", theta = 10000.0 }, {}]");
  EXPECT_EQ(m.rotary(1), m.rotary());
  // Before version 5 of transformers, rope_scaling was that of layers without a window.
  const Json linear = {{"rope_type", "linear"}, {"factor", 8.0}};
  Json older = with(with(gemma3(), "rope_scaling", linear), "rope_local_base_freq", 20000);
  Json newer = gemma3();
  newer.erase("rope_theta");
  newer["rope_parameters"] = {{"full_attention", with(linear, "rope_theta", 500000.0)},
                              {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 20000}}}};
  for (const Json& config : {older, newer}) {
    const ModelSection both = read(config).model;
    EXPECT_EQ(both.rotary(0), (RotarySpec{.head_dim = 256, .theta = 20000, .fp32 = true}));
    EXPECT_EQ(both.rope_theta, 500000);
    EXPECT_EQ(both.rope_scaling, (RotaryScaling{.kind = RotaryScaling::Kind::kLinear, .factor = 8}));
  }
  newer["rope_parameters"].erase("sliding_attention");
  EXPECT_EQ(read(newer).model.rotary(0).theta, 10000);
  expect_refusal(with(newer, "rope_scaling", linear), "rope_scaling");
  expect_refusal(with(newer, "rope_theta", 1.0), "rope_theta");
  newer["rope_parameters"]["sliding_attention"] = {{"rope_type", "default"}, {"factr", 1}};
  expect_refusal(newer, "rope_parameters.sliding_attention.factr");
  newer["rope_parameters"] = linear;
  EXPECT_NE(refusal(newer).find("\"rope_parameters."), std::string::npos) << refusal(newer);
  expect_refusal(with(gemma3(), "final_logit_softcapping", 30.0), "final_logit_softcapping");
  expect_refusal(with(gemma3(), "attn_logit_softcapping", 50.0), "attn_logit_softcapping");
  expect_refusal(with(gemma3(), "use_bidirectional_attention", true), "use_bidirectional_attention");
  expect_refusal(with(gemma3(), "hidden_activation", "gelu"), "hidden_activation");
  expect_refusal(with(gemma3(), "hidden_act", "silu"), "hidden_act");
  expect_refusal(with(gemma3(), "query_pre_attn_scalar", 0), "query_pre_attn_scalar");
  expect_refusal(with(gemma3(), "sliding_window_pattern", 0), "sliding_window_pattern");
  expect_refusal(with(llama(), "query_pre_attn_scalar", 16), "query_pre_attn_scalar");
  expect_refusal(with(llama(), "rope_local_base_freq", 10000), "rope_local_base_freq");
}

// Configurations as published give the published numbers of parameters.
TEST(ModelConfig, PublishedModelsHaveTheirParameterCounts) {
  const auto count = [](const std::string& text) {
    return parameter_count(parse_folder_config(text, "model/config.json").model);
  };
  EXPECT_EQ(count(R"({"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0",
    "use_cache": true, "vocab_size": 32000})"),
            6'738'415'616);
  EXPECT_EQ(count(R"({"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
    "vocab_size": 128256})"),
            1'235'814'400);
  EXPECT_EQ(count(R"({"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": true,
    "vocab_size": 32768})"),
            7'248'023'552);
  EXPECT_EQ(count(R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 152064})"),
            7'615'616'512);
  EXPECT_EQ(count(R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936})"),
            8'190'735'360);
  EXPECT_EQ(count(R"({"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false,
    "model_type": "smollm3", "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
    "use_cache": false, "use_sliding_window": false, "vocab_size": 128256})"),
            3'075'098'624);
  EXPECT_EQ(count(R"({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144})"),
            999'885'952);
}

TEST(ModelConfig, ReadsRotaryScalingInBothSpellings) {
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const RotaryScaling expected{.kind = RotaryScaling::Kind::kLlama3,
                               .factor = 8,
                               .original_context = 8192,
                               .low_freq_factor = 1,
                               .high_freq_factor = 4};
  EXPECT_EQ(read(with(llama(), "rope_scaling", llama3)).model.rope_scaling, expected);
  Json newer = llama();
  newer.erase("rope_theta");
  newer["rope_parameters"] = with(llama3, "rope_theta", 250000.0);
  EXPECT_EQ(read(newer).model.rope_scaling, expected);
  EXPECT_EQ(read(newer).model.rope_theta, 250000);

  const Json linear = {{"type", "linear"}, {"factor", 4}};
  EXPECT_EQ(read(with(llama(), "rope_scaling", linear)).model.rope_scaling,
            (RotaryScaling{.kind = RotaryScaling::Kind::kLinear, .factor = 4}));

  const Json yarn = {{"type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 128}};
  RotaryScaling y{.kind = RotaryScaling::Kind::kYarn, .factor = 4, .original_context = 128};
  EXPECT_EQ(read(with(qwen2(), "rope_scaling", yarn)).model.rope_scaling, y);
  EXPECT_EQ(read(with(qwen2(), "rope_scaling", with(yarn, "factor", nullptr))).model.rope_scaling, y) << "512 / 128";
  Json more = yarn;
  more["beta_fast"] = 16;
  more["beta_slow"] = 0;
  more["attention_factor"] = 1.5;
  more["truncate"] = false;
  y.beta_fast = 16;
  y.attention_factor = 1.5;
  y.truncate = false;
  EXPECT_EQ(read(with(qwen2(), "rope_scaling", more)).model.rope_scaling, y);
  Json lacks = yarn;
  lacks.erase("original_max_position_embeddings");
  EXPECT_EQ(read(with(qwen2(), "rope_scaling", lacks)).model.rope_scaling.original_context, 512);
  EXPECT_EQ(read(with(with(qwen2(), "rope_scaling", yarn), "original_max_position_embeddings", 64))
                .model.rope_scaling.original_context,
            64);
  EXPECT_EQ(read(with(llama(), "rope_scaling", {{"type", "default"}})).model.rope_scaling, RotaryScaling());
}

TEST(ModelConfig, RefusesUnsupportedRotaryScaling) {
  const auto scaling = [](const Json& members) { return with(llama(), "rope_scaling", members); };
  expect_refusal(scaling({{"type", "dynamic"}, {"factor", 2.0}}), "rope_scaling.type");
  expect_refusal(scaling({{"rope_type", "longrope"}, {"factor", 2.0}}), "rope_scaling.rope_type");
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 128}};
  // As in transformers, one of the two keys alone, or both beside an attention factor, have no effect.
  const Json both = with(with(yarn, "mscale", 1.0), "mscale_all_dim", 0.7);
  expect_refusal(scaling(both), "rope_scaling.mscale");
  const auto factor = [&](const Json& members) { return read(scaling(members)).model.rotary().attention_factor(); };
  EXPECT_EQ(factor(with(yarn, "mscale", 1.0)), factor(yarn));
  EXPECT_EQ(factor(with(both, "attention_factor", 1.5)), 1.5);
  expect_refusal(scaling(with(yarn, "partial_rotary_factor", 0.5)), "rope_scaling.partial_rotary_factor");
  expect_refusal(scaling(with(yarn, "surprise", 1.0)), "rope_scaling.surprise");
  expect_refusal(scaling(with(yarn, "factor", 0.5)), "rope_scaling.factor");
  expect_refusal(scaling(with(yarn, "attention_factor", 0)), "rope_scaling.attention_factor");
  expect_refusal(scaling(with(yarn, "type", "linear")), "rope_scaling.type");
  expect_refusal(scaling({{"rope_type", "llama3"}, {"factor", 8.0}}), "rope_scaling.low_freq_factor");
  expect_refusal(scaling(with(yarn, "rope_theta", 1.0)), "rope_theta");
  expect_refusal(scaling("yarn"), "rope_scaling");
  expect_refusal(with(scaling(yarn), "rope_parameters", {{"rope_type", "default"}}), "rope_scaling");
  expect_refusal(with(llama(), "rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}),
                 "rope_parameters.full_attention");
}

TEST(ModelConfig, RefusesUnsupportedSettingsByKey) {
  for (const auto& [key, value] :
       std::initializer_list<std::pair<std::string, Json>>{{"num_local_experts", 8},
                                                           {"num_experts", 64},
                                                           {"attn_logit_softcapping", 50.0},
                                                           {"final_logit_softcapping", 30.0},
                                                           {"attention_sinks", 4},
                                                           {"quantization_config", {{"quant_method", "gptq"}}},
                                                           {"auto_map", {{"AutoModel", "modeling.Mine"}}},
                                                           {"partial_rotary_factor", 0.5},
                                                           {"hidden_act", "gelu"},
                                                           {"is_encoder_decoder", true},
                                                           {"chunk_size_feed_forward", 8},
                                                           {"pruned_heads", {{"0", {1}}}},
                                                           {"num_hiden_layers", 4},
                                                           {"rope_parameters.factor", 4},
                                                           {"sliding_window", 128},
                                                           {"layer_types", {"full_attention"}},
                                                           {"attention_dropout", 1.0},
                                                           {"hidden_size", 64.0},
                                                           {"hidden_size", -64},
                                                           {"hidden_size", 18446744073709551615u},
                                                           {"num_hidden_layers", 100001},
                                                           {"num_hidden_layers", nullptr},
                                                           {"vocab_size", "many"},
                                                           {"head_dim", int64_t{1} << 40},
                                                           {"rms_norm_eps", -1e-5},
                                                           {"max_position_embeddings", 0},
                                                           {"tie_word_embeddings", 1},
                                                           {"model_type", "gemma3"},
                                                           {"architectures", {"LlamaForSequenceClassification"}}}) {
    expect_refusal(with(llama(), key, value), key);
  }
  expect_refusal(with(mistral(), "attention_bias", true), "attention_bias");
  expect_refusal(with(mistral(), "layer_types", {"full_attention"}), "layer_types");
  expect_refusal(with(qwen3(), "mlp_bias", true), "mlp_bias");
  EXPECT_NE(refusal(with(llama(), "num_hiden_layers", 4)).find("did you mean \"num_hidden_layers\"?"),
            std::string::npos);
  EXPECT_NE(refusal(with(llama(), "num_key_value_heads", 3)).find("kv_heads"), std::string::npos);
  EXPECT_NE(refusal(with(llama(), "head_dim", 15)).find("even"), std::string::npos);
  // Settings without an effect are accepted.
  EXPECT_EQ(refusal(with(llama(), "quantization_config", nullptr)), "nothing");
  EXPECT_EQ(refusal(with(mistral(), "attention_bias", false)), "nothing");
}

TEST(ModelConfig, RefusesMalformedFiles) {
  EXPECT_NE(refusal_of_text("{").find("model/config.json: expected JSON"), std::string::npos);
  EXPECT_NE(refusal_of_text("[1]").find("expected a JSON object"), std::string::npos);
  EXPECT_NE(refusal_of_text(R"({"model_type": "llama", "model_type": "qwen2"})").find("appears twice"),
            std::string::npos);
  EXPECT_NE(refusal_of_text("{\"id2label\": " + std::string(1000, '[') + std::string(1000, ']') + "}")
                .find("nested too deeply"),
            std::string::npos);
  EXPECT_THROW(read_model_config("/nowhere/at/all"), Error);
}

}  // namespace
}  // namespace annulus::model_config_test
