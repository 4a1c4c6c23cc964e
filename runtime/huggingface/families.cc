// See families.h.
#include "runtime/huggingface/families.h"

#include <cmath>

namespace annulus::huggingface {

const std::vector<Family>& families() {
  static const std::vector<Family> table = {
      {.name = "llama", .architecture = "LlamaForCausalLM", .bias_key = true, .mlp_bias_key = true, .divides = true},
      {.name = "mistral", .architecture = "MistralForCausalLM", .windows = Windows::kAllLayers, .kv_heads = 8},
      {.name = "smollm3",
       .architecture = "SmolLM3ForCausalLM",
       .bias_key = true,
       .mlp_bias_key = true,
       .windows = Windows::kEachLayer,
       .window_switch = true,
       .window = 0,
       .rotaries = Rotaries::kOrNone,
       .rope_theta = 2e6,
       .tied = true,
       .kv_heads = 4},
      {.name = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .qkv_bias = true,
       .windows = Windows::kEachLayer,
       .window_switch = true,
       .kv_heads = 32},
      {.name = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .bias_key = true,
       .qk_norm = true,
       .windows = Windows::kEachLayer,
       .window_switch = true,
       .kv_heads = 32,
       .head_dim = 128},
      {.name = "gemma3_text",
       .architecture = "Gemma3ForCausalLM",
       .bias_key = true,
       .qk_norm = true,
       .gemma = true,
       .windows = Windows::kEachLayer,
       .rotaries = Rotaries::kByWindow,
       .rope_theta = 1e6,
       .tied = true,
       .kv_heads = 4,
       .head_dim = 256,
       .divides = true},
  };
  return table;
}

PatternSpec window_pattern(int64_t w) {
  if (w == 0) return causal_pattern();
  PatternSpec pattern;
  pattern.kind = PatternSpec::Kind::kWindow;
  pattern.left = w - 1;
  return pattern;
}

int64_t window_of(const ModelSection& model, int64_t layer) {
  const PatternSpec& pattern = model.pattern.of(layer);
  if (pattern == causal_pattern()) return 0;
  const int64_t w = pattern.left + 1;
  return pattern == window_pattern(w) ? w : -1;
}

RotarySpec rotary_of(const Family& family, const ModelSection& model, bool with_window) {
  for (int64_t i = 0; i < model.layers; ++i) {
    const RotarySpec spec = model.rotary(i);
    if (family.rotaries == Rotaries::kOrNone && spec.scaling.kind == RotaryScaling::Kind::kNone) continue;
    if (family.rotaries != Rotaries::kByWindow || (window_of(model, i) > 0) == with_window) return spec;
  }
  return model.rotary();
}

namespace {

// Why the family cannot express the model's rotary settings by layer; "" if it can.
std::string why_not_rotaries(const Family& f, const ModelSection& m, bool patterns) {
  const std::string name(f.name);
  for (int64_t i = 0; i < m.layers; ++i) {
    const RotarySpec spec = m.rotary(i);
    const std::string layer = "layer " + std::to_string(i);
    if (spec.scaling.kind == RotaryScaling::Kind::kNone) {
      if (f.rotaries == Rotaries::kOrNone) continue;
      return layer + " has no rotary positions, but those of " + name + " always have";
    }
    if (f.rotaries == Rotaries::kByWindow && !patterns) continue;  // the windows are not the model's
    if (spec == rotary_of(f, m, window_of(m, i) > 0)) continue;
    return layer + " rotates in a way of its own (model.rope_layers), but in " + name +
           (f.rotaries == Rotaries::kByWindow ? " all layers with a window rotate alike, and all without"
                                              : " all layers that rotate do so alike");
  }
  return "";
}

// Why the family cannot express the forms of a layer in which Gemma 3 differs from the others; "" if it can.
std::string why_not_forms(const Family& f, const ModelSection& m) {
  const std::string name(f.name), has = name + (f.gemma ? " always has " : " has no ");
  if ((m.activation == Activation::kGeluTanh) != f.gemma) {
    return name + " has model.activation = \"" + activation_name(f.gemma ? Activation::kGeluTanh : Activation::kSilu) +
           "\"";
  }
  if (m.post_norms != f.gemma) return has + "norms of what layers add (model.post_norms)";
  if (m.norm_zero_centered != f.gemma) return has + "norms that multiply by 1 + weight (model.norm_zero_centered)";
  if (m.scale_embeddings != f.gemma) return has + "scaled embeddings (model.scale_embeddings)";
  const double divisor = m.score_divisor();
  if (!f.gemma && divisor != static_cast<double>(m.head_dim())) {
    return name + " divides scores by the root of head_dim (model.query_pre_attn_scalar)";
  }
  if (divisor != std::floor(divisor)) return name + " needs a whole number as model.query_pre_attn_scalar";
  return "";
}

}  // namespace

std::string why_not(const Family& f, const ModelSection& m, bool patterns) {
  const std::string name(f.name);
  if (m.qk_norm != f.qk_norm) return name + (f.qk_norm ? " always has" : " has no") + " norms of queries and keys";
  if (m.attention_sinks.any()) return name + " has no attention sinks";
  if (m.softcap != 0) return name + " has no soft cap of attention's scores";
  if (!f.bias_key && m.qkv_bias != f.qkv_bias) {
    return name + (f.qkv_bias ? " always has" : " has no") + " biases of queries, keys and values";
  }
  if (!f.bias_key && m.out_bias) return name + " has no bias of attention's output";
  if (f.bias_key && m.qkv_bias != m.out_bias) {
    return name + " has biases of queries, keys, values and attention's output, or none";
  }
  if (m.mlp_bias && !f.mlp_bias_key) return name + " has no biases of the MLP";
  if (f.divides && m.dim % m.heads != 0) return name + " needs a width that is a multiple of the number of heads";
  if (const std::string reason = why_not_forms(f, m); !reason.empty()) return reason;
  if (const std::string reason = why_not_rotaries(f, m, patterns); !reason.empty()) return reason;
  if (!patterns) return "";
  int64_t window = 0;
  const auto one = static_cast<int64_t>(m.pattern.each.size());
  for (int64_t i = 0; i < (one == 0 ? 1 : one); ++i) {
    const int64_t w = window_of(m, i);
    const std::string said = "model.pattern of layer " + std::to_string(i) + " is " + m.pattern.of(i).text() + ", but ";
    if (w < 0) return said + name + " has only causal patterns and windows into the past";
    if (w > 0 && f.windows == Windows::kNone) return said + name + " has no windows";
    if (f.windows == Windows::kAllLayers && i > 0 && w != window) return said + name + " has one window for all layers";
    if (w > 0 && window > 0 && w != window) return said + name + " has one window for all layers that have one";
    if (w > 0 || i == 0) window = w;
  }
  return "";
}

}  // namespace annulus::huggingface
