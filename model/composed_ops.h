// The decoder's operations between matrix products, and their gradients, composed of LibTorch's operators for every
// device and floating-point dtype (they have never run on a GPU). fused_ops.cc calls them where its fp32 loops
// for a CPU do not apply. Nothing here records a gradient or waits for the device.
// Statistics, rotations and losses are fp32 if tensors are bf16 or fp16. Thread safety: free functions without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "memory/charge.h"

namespace annulus::composed {

// As fused::add_rms_norm (fused_loops.h). If delta is undefined, `sum` is x itself.
struct RmsNorm {
  at::Tensor sum;      // [rows, dim]
  at::Tensor y;        // [rows, dim]
  at::Tensor inv_rms;  // [rows, 1]
};
RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps);

struct RmsNormGradient {
  at::Tensor dx;
  at::Tensor dweight;
};
// dsum may be undefined.
RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                      const at::Tensor& weight, const at::Tensor& inv_rms);

// Memory that these two take on a CPU besides their results, with elements of `wide` bytes (memory/charge.h).
std::vector<Charge> norm_charges(int64_t rows, int64_t dim, int64_t wide);

// Writes x [batch, n, heads, head_dim], rotated by the table's angles [n, head_dim / 2], to out; `backward` rotates the
// other way. Pairs are (i, i + head_dim / 2). Both tensors may be strided.
void rotate_into(const at::Tensor& out, const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine,
                 bool backward);

// As fused::swiglu.
at::Tensor swiglu(const at::Tensor& gate_up);
at::Tensor swiglu_backward(const at::Tensor& dout, const at::Tensor& gate_up);

struct CrossEntropy {
  at::Tensor loss;     // a scalar: the sum over rows of -log softmax(logits)[target]
  at::Tensor dlogits;  // (softmax - onehot) * scale; undefined without gradient
};
// logits [rows, vocab] are handed over, so that no more than two matrices of their size are held at once. A row whose
// target is -1 does not count.
CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, double scale, bool with_gradient);

}  // namespace annulus::composed
