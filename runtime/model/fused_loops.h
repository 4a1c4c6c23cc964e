// The decoder's element-wise fp32 loops on a CPU, each of which passes once over contiguous arrays. fused_ops.cc calls
// them with ranges of rows; they use neither tensors nor threads. Every function is compiled for each instruction set
// (common/simd/versions.h).
#pragma once

#include <cstdint>

namespace annulus::fused {

// RMSNorm after a residual addition (arXiv 1910.07467): sum = x + delta (delta may be null), inv_rms[r] = 1 /
// sqrt(mean(sum^2) + eps), y = sum * inv_rms * weight. x, delta, sum, y: [rows, dim].
void add_rms_norm(const float* x, const float* delta, const float* weight, float eps, int64_t rows, int64_t dim,
                  float* sum, float* y, float* inv_rms);

// The gradient of `add_rms_norm` with respect to x, which is also that of delta. dsum, the gradient that reaches `sum`
// by other paths, may be null. The gradient of weight is added to dweight [dim].
void add_rms_norm_backward(const float* dy, const float* dsum, const float* sum, const float* weight,
                           const float* inv_rms, int64_t rows, int64_t dim, float* dx, float* dweight);

// Splits one projection into heads and rotates queries and keys: qkv [rows, (heads + 2 kv_heads) head_dim], cosine and
// sine [positions, head_dim / 2], of which row r takes row r % positions. Pairs are (i, i + head_dim / 2).
struct RotaryShape {
  int64_t positions, heads, kv_heads, head_dim;
};
void rotary_split(const float* qkv, const float* cosine, const float* sine, const RotaryShape& shape, int64_t first_row,
                  int64_t rows, float* q, float* k, float* v);
void rotary_split_backward(const float* dq, const float* dk, const float* dv, const float* cosine, const float* sine,
                           const RotaryShape& shape, int64_t first_row, int64_t rows, float* dqkv);

// SwiGLU (arXiv 2002.05202): gate_up [rows, 2 ffn] holds gate and up side by side; out = silu(gate) * up [rows, ffn].
void swiglu(const float* gate_up, int64_t rows, int64_t ffn, float* out);
void swiglu_backward(const float* dout, const float* gate_up, int64_t rows, int64_t ffn, float* dgate_up);

// Returns the sum of the losses of all rows, -log softmax(logits)[target]. If `dlogits` is not null, it becomes
// (softmax - onehot) * scale; it may be `logits` itself. Targets must be below vocab; a row whose target is -1 has no
// loss and no gradient.
double cross_entropy(const float* logits, const int64_t* targets, int64_t rows, int64_t vocab, float scale,
                     float* dlogits);

}  // namespace annulus::fused
