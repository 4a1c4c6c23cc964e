// The decoder's operations between matrix products, each with its gradient. On a CPU in fp32 they are single passes
// over memory (fused_loops.h) with autograd nodes of their own; for other dtypes and devices the same mathematics is
// composed of LibTorch's operators. Called by model.cc. Thread safety: free functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "modules/rotary.h"

namespace annulus {

struct Normed {
  at::Tensor sum;  // x + delta
  at::Tensor y;    // RMSNorm of sum
};
// x [rows, dim] and delta (like x, or undefined: nothing is added); weight [dim]. Differentiable in all three.
Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);

struct Heads {
  at::Tensor q;  // [batch, n, heads, head_dim]
  at::Tensor k;  // [batch, n, kv_heads, head_dim]
  at::Tensor v;
};
// qkv [batch * n, (heads + 2 kv_heads) head_dim] -> contiguous q, k, v; q and k are rotated. n is the table's length.
Heads rotary_split(const at::Tensor& qkv, const RotaryTable& table, int64_t heads, int64_t kv_heads);

// gate_up [rows, 2 ffn] -> silu(gate) * up [rows, ffn].
at::Tensor swiglu(const at::Tensor& gate_up);

// scale * sum over rows of -log softmax(logits)[target], a scalar of logits' dtype. logits [rows, vocab], targets int64
// [rows]. Error(kInput) when a target is outside [0, vocab).
at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, double scale);

}  // namespace annulus
