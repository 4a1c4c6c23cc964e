// A small config.json of each family. Used by the tests of runtime/huggingface/model_config.h.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "attention/modules/rotary_spec.h"
#include "runtime/huggingface/model_config.h"

namespace annulus::testing::config_json {

using Json = nlohmann::json;

inline Json base(const std::string& family, const std::string& architecture) {
  return {{"model_type", family},
          {"architectures", {architecture}},
          {"hidden_size", 64},
          {"num_hidden_layers", 4},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"intermediate_size", 96},
          {"vocab_size", 320},
          {"max_position_embeddings", 512},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 500000.0},
          {"torch_dtype", "bfloat16"},
          {"id2label", {{"0", "LABEL_0"}}},
          {"transformers_version", "4.43.0"}};
}
inline Json llama() { return base("llama", "LlamaForCausalLM"); }
inline Json mistral() { return base("mistral", "MistralForCausalLM"); }
inline Json qwen2() { return base("qwen2", "Qwen2ForCausalLM"); }
inline Json qwen3() { return base("qwen3", "Qwen3ForCausalLM"); }
inline Json smollm3() { return base("smollm3", "SmolLM3ForCausalLM"); }
inline Json gemma3() {
  Json config = base("gemma3_text", "Gemma3ForCausalLM");
  config.erase("hidden_act");
  config["hidden_activation"] = "gelu_pytorch_tanh";
  config["sliding_window"] = 64;
  config["sliding_window_pattern"] = 2;
  return config;
}

inline FolderConfig read(const Json& config) { return parse_folder_config(config.dump(), "model/config.json"); }

inline Json with(Json config, const std::string& key, const Json& value) {
  config[key] = value;
  return config;
}

inline std::string window(int64_t left) {
  return "{ kind = \"window\", left = " + std::to_string(left) + ", right = 0 }";
}

inline RotaryScaling none() { return {.kind = RotaryScaling::Kind::kNone}; }

}  // namespace annulus::testing::config_json
