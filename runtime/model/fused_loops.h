// The decoder's fused fp32 loops on a CPU, each a single pass over contiguous arrays. loop_ops.cc calls them with
// ranges of rows; they use neither tensors nor threads. They are compiled for each instruction set
// (common/simd/versions.h).
#pragma once

#include <cstdint>

namespace annulus::fused {

struct NormFactor {
  const float* weight;  // [dim]
  float offset;
};

struct RotaryShape {
  int64_t positions, heads, kv_heads, head_dim;
};

struct Loops {
  // RMSNorm after a residual addition (arXiv 1910.07467): sum = x + delta (delta may be null), inv_rms[r] = 1 /
  // sqrt(mean(sum^2) + eps), y = sum * inv_rms * (offset + weight). x, delta, sum, y: [rows, dim].
  void (*add_rms_norm)(const float* x, const float* delta, NormFactor factor, float eps, int64_t rows, int64_t dim,
                       float* sum, float* y, float* inv_rms);

  // Sets dx to the gradient of x, which is also that of delta, and adds the gradient of weight to dweight [dim]. dsum,
  // the gradient of `sum` from its other consumers, may be null.
  void (*add_rms_norm_backward)(const float* dy, const float* dsum, const float* sum, NormFactor factor,
                                const float* inv_rms, int64_t rows, int64_t dim, float* dx, float* dweight);

  // Splits the fused projection into heads and rotates queries and keys: qkv [rows, (heads + 2 kv_heads) head_dim],
  // cosine and sine [positions, head_dim / 2]; row r uses row r % positions of them. Pairs are (i, i + head_dim / 2).
  void (*rotary_split)(const float* qkv, const float* cosine, const float* sine, const RotaryShape& shape,
                       int64_t first_row, int64_t rows, float* q, float* k, float* v);
  void (*rotary_split_backward)(const float* dq, const float* dk, const float* dv, const float* cosine,
                                const float* sine, const RotaryShape& shape, int64_t first_row, int64_t rows,
                                float* dqkv);

  // SwiGLU (arXiv 2002.05202): each row of gate_up [rows, 2 ffn] is gate, then up; out = silu(gate) * up [rows, ffn].
  void (*swiglu)(const float* gate_up, int64_t rows, int64_t ffn, float* out);
  void (*swiglu_backward)(const float* dout, const float* gate_up, int64_t rows, int64_t ffn, float* dgate_up);

  // The same with GELU, by its tanh approximation (Activation::kGeluTanh), in place of SiLU.
  void (*geglu)(const float* gate_up, int64_t rows, int64_t ffn, float* out);
  void (*geglu_backward)(const float* dout, const float* gate_up, int64_t rows, int64_t ffn, float* dgate_up);

  // Returns the sum over rows of weight * -log softmax(logits)[target]. If `dlogits`, which may alias `logits`, is not
  // null, it becomes (softmax - onehot) * weight * scale. Without `weights` (null) all are 1. Targets must be below
  // vocab; -1 is ignored (no loss, no gradient).
  double (*cross_entropy)(const float* logits, const int64_t* targets, const float* weights, int64_t rows,
                          int64_t vocab, float scale, float* dlogits);
};

// Returns the loops for this process's instruction set.
const Loops& loops();

}  // namespace annulus::fused
