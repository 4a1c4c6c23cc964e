// See families.h.
#include "runtime/huggingface/families.h"

namespace annulus::huggingface {

const std::vector<Family>& families() {
  static const std::vector<Family> table = {
      {.name = "llama", .architecture = "LlamaForCausalLM", .bias_key = true, .mlp_bias_key = true, .divides = true},
      {.name = "mistral", .architecture = "MistralForCausalLM", .windows = Windows::kAllLayers, .kv_heads = 8},
      {.name = "qwen2",
       .architecture = "Qwen2ForCausalLM",
       .qkv_bias = true,
       .windows = Windows::kEachLayer,
       .kv_heads = 32},
      {.name = "qwen3",
       .architecture = "Qwen3ForCausalLM",
       .bias_key = true,
       .qk_norm = true,
       .windows = Windows::kEachLayer,
       .kv_heads = 32,
       .head_dim = 128},
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

std::string why_not(const Family& f, const ModelSection& m, bool patterns) {
  const std::string name(f.name);
  if (m.qk_norm != f.qk_norm) return name + (f.qk_norm ? " always has" : " has no") + " norms of queries and keys";
  if (m.attention_sinks) return name + " has no attention sinks";
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
