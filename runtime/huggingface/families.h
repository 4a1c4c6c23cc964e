// The families of decoders in Hugging Face's layout: what each of them can express. Used by model_config.cc and
// write_config.cc. Internal to runtime/huggingface/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/config/config.h"

namespace annulus::huggingface {

enum class Windows { kNone, kAllLayers, kEachLayer };

struct Family {
  std::string_view name;          // model_type
  std::string_view architecture;  // of the causal language model
  bool qkv_bias = false;          // always there; with `bias_key`, attention_bias decides
  bool bias_key = false;          // has attention_bias, for queries, keys, values and output
  bool mlp_bias_key = false;      // has mlp_bias
  bool qk_norm = false;
  Windows windows = Windows::kNone;
  int64_t kv_heads = 0;  // if the key is missing; 0: as many as heads
  int64_t head_dim = 0;  // likewise; 0: hidden_size / num_attention_heads
  bool divides = false;  // hidden_size must be a multiple of num_attention_heads
};

// The simplest family comes first.
const std::vector<Family>& families();

// Why this family cannot express this model; empty: it can. `patterns`: its patterns count, too.
std::string why_not(const Family& family, const ModelSection& model, bool patterns);

// A causal pattern with a window of w keys, the query's own included; 0: without a window.
PatternSpec window_pattern(int64_t w);

// The w for which a layer's pattern is window_pattern(w); -1: there is none.
int64_t window_of(const ModelSection& model, int64_t layer);

}  // namespace annulus::huggingface
