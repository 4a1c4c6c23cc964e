// A small module for the tests of MultiheadAttention.
#pragma once

#include <ATen/ops/randn_like.h>

#include "attention/modules/multihead_attention.h"

namespace annulus::testing {

inline MultiheadAttention made(MultiheadAttentionOptions options) {
  MultiheadAttention module(options);
  module->to(at::kDouble);
  const at::NoGradGuard no_gradients;
  // Makes biases and norms differ from their initial zeros and ones, which have no effect.
  for (auto& p : module->parameters()) p.add_(at::randn_like(p) * 0.1);
  return module;
}

inline MultiheadAttentionOptions small() {
  MultiheadAttentionOptions o;
  o.dim = 12, o.heads = 4, o.kv_heads = 2, o.head_dim = 6;
  o.pattern = causal_pattern();
  return o;
}

}  // namespace annulus::testing
