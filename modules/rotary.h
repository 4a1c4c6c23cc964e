// Rotary embedding (arXiv 2104.09864) by global position, in pairs (i, i + head_dim / 2). Used by MultiheadAttention
// and by the training model (runtime/fused_ops.h, which has single passes for fp32 on a CPU). Thread safety: functions
// without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

struct RotaryTable {
  at::Tensor cosine;  // [n, head_dim / 2]
  at::Tensor sine;
};

// positions: int64 [n], any device; angles are made in fp64. head_dim must be even.
RotaryTable make_rotary_table(const at::Tensor& positions, int64_t head_dim, double theta, at::ScalarType dtype,
                              at::Device device);

// x [..., n, heads, head_dim], n as in the table. Differentiable in x.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table);

}  // namespace annulus
