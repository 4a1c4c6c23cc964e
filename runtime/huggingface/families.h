// The decoder families in Hugging Face's layout and what each can express. Used by model_config.cc and write_config.cc.
// Internal to runtime/huggingface/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/config.h"

namespace annulus::huggingface {

enum class Windows { kNone, kAllLayers, kEachLayer };

// How the layers rotate queries and keys, and which of them have a window if layer_types is missing.
enum class Rotaries {
  kAlike,    // all alike; the layers from max_window_layers on
  kOrNone,   // no_rope_layers names layers that do not rotate; those layers
  kByWindow  // layers with a window in one way, the others in another; all but every sliding_window_pattern-th
};

struct Family {
  std::string_view name;          // model_type
  std::string_view architecture;  // "LlamaForCausalLM"
  bool qkv_bias = false;          // always present; with `bias_key`, attention_bias decides
  bool bias_key = false;          // has the key attention_bias, for queries, keys, values and output
  bool mlp_bias_key = false;      // has the key mlp_bias
  bool qk_norm = false;
  // The MLP, the norms, the embeddings and the scale of scores, together as Gemma 3 has them.
  bool gemma = false;
  Windows windows = Windows::kNone;
  bool window_switch = false;  // has the key use_sliding_window
  int64_t window = 4096;       // the default; 0: none
  Rotaries rotaries = Rotaries::kAlike;
  double rope_theta = 10000;  // the default
  bool tied = false;          // the default of tie_word_embeddings
  int64_t kv_heads = 0;       // the default; 0: equal to heads
  int64_t head_dim = 0;       // the default; 0: hidden_size / num_attention_heads
  bool divides = false;       // hidden_size must be a multiple of num_attention_heads
};

// Returns all families, the simplest first.
const std::vector<Family>& families();

// Returns why this family cannot express this model, with its patterns if `patterns`; "" if it can.
std::string why_not(const Family& family, const ModelSection& model, bool patterns);

// Returns a causal pattern with a window of w keys, the query's own included; 0: no window.
PatternSpec window_pattern(int64_t w);

// Returns the w for which a layer's pattern is window_pattern(w); -1 if there is none.
int64_t window_of(const ModelSection& model, int64_t layer);

// The rotary embedding of the layers with a window, or of those without, in a family of Rotaries::kByWindow, or of all
// layers that rotate in another one; that of rope_theta and rope_scaling if there is no such layer.
RotarySpec rotary_of(const Family& family, const ModelSection& model, bool with_window);

}  // namespace annulus::huggingface
