// The families of decoders: what each of them can be, as a value. Internal to huggingface/.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"

namespace annulus::huggingface {

enum class Windows { kNone, kAllLayers, kEachLayer };

struct Family {
  std::string_view name;          // model_type
  std::string_view architecture;  // of the causal language model
  bool qkv_bias;                  // always; with `bias_key` as attention_bias says
  bool bias_key;                  // attention_bias, of queries, keys, values and output
  bool mlp_bias_key;              // mlp_bias
  bool qk_norm;
  Windows windows;
  int64_t kv_heads;  // where the key is missing; 0: as many as heads
  int64_t head_dim;  // likewise; 0: hidden_size / num_attention_heads
  bool divides;      // hidden_size must be a multiple of num_attention_heads
};

// The simplest first.
const std::vector<Family>& families();

// Why this family cannot be this model; empty: it can. `patterns`: also its patterns.
std::string why_not(const Family& family, const ModelSection& model, bool patterns);

// Causal, with a window of w keys, the query's own included; 0: without one.
PatternSpec window_pattern(int64_t w);

// The w of a layer's pattern, if it is one of these; else -1.
int64_t window_of(const ModelSection& model, int64_t layer);

}  // namespace annulus::huggingface
