// The interface of the decoder's operations between matrix products and their gradients, without autograd. Its
// implementations are loops for fp32 on a CPU (loop_ops.cc), kernels for GPUs (gpu_ops.cc), and LibTorch's operators
// otherwise (composed_ops.cc). choose_ops.cc chooses one for each call; decoder_layer.cc calls them.
//
// Statistics, rotations and losses are fp32 if tensors are bf16 or fp16. Nothing here waits for the device. Thread
// safety: const objects without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "runtime/model/activation.h"

namespace annulus {

// What an RMSNorm multiplies by: offset + weight [dim]. A plain tensor has the offset 0, and a weight that is centered
// at zero the offset 1 (ModelShape::norm_zero_centered).
struct NormWeight {
  NormWeight() = default;
  NormWeight(at::Tensor of, double added = 0)  // NOLINT(google-explicit-constructor)
      : weight(std::move(of)), offset(added) {}

  at::Tensor weight;
  double offset = 0;
};

struct RmsNorm {
  at::Tensor sum;      // [rows, dim]; x itself without delta, except with loops
  at::Tensor y;        // [rows, dim]
  at::Tensor inv_rms;  // one statistic per row
};
struct RmsNormGradient {
  at::Tensor dx;
  at::Tensor dweight;  // [dim], fp32 if tensors are bf16 or fp16, so that sums over tiles of rows are rounded once
};

struct HeadNormed {
  at::Tensor y;        // like qkv
  at::Tensor inv_rms;  // [rows, heads + kv_heads]
};
struct HeadNormGradient {
  at::Tensor dqkv;
  at::Tensor dq_weight, dk_weight;  // [head_dim], likewise
};

struct Heads {
  at::Tensor q;  // [batch, n, heads, head_dim]
  at::Tensor k;  // [batch, n, kv_heads, head_dim]
  at::Tensor v;
  at::Tensor sinks = {};  // [heads], of gradients of a layer with sinks
};

struct CrossEntropy {
  at::Tensor loss;     // a scalar: the sum over rows of weight * -log softmax(logits)[target]
  at::Tensor dlogits;  // (softmax - onehot) * weight * scale, with contiguous rows; undefined without gradient
};

class DecoderOps {
 public:
  virtual ~DecoderOps() = default;

  // As fused::Loops::add_rms_norm (fused_loops.h). x [rows, dim]; delta may be undefined.
  virtual RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight,
                               double eps) const = 0;
  // dsum may be undefined.
  virtual RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                                const NormWeight& weight, const at::Tensor& inv_rms) const = 0;

  // qkv [rows, (heads + 2 kv_heads) head_dim]; weights [head_dim]. Value heads are copied.
  virtual HeadNormed head_norm(const at::Tensor& qkv, const NormWeight& q_weight, const NormWeight& k_weight,
                               int64_t heads, int64_t kv_heads, double eps) const = 0;
  virtual HeadNormGradient head_norm_backward(const at::Tensor& dy, const at::Tensor& qkv, const NormWeight& q_weight,
                                              const NormWeight& k_weight, const at::Tensor& inv_rms,
                                              int64_t heads) const = 0;

  // As fused::Loops::rotary_split. cosine and sine [n, head_dim / 2].
  virtual Heads rotary_split(const at::Tensor& qkv, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                             int64_t kv_heads) const = 0;
  // Returns the gradient of qkv.
  virtual at::Tensor rotary_split_backward(const Heads& gradients, const at::Tensor& cosine,
                                           const at::Tensor& sine) const = 0;

  // The gated product of gate_up [rows, 2 ffn], gate and then up: [rows, ffn].
  virtual at::Tensor glu(const at::Tensor& gate_up, Activation activation) const = 0;
  virtual at::Tensor glu_backward(const at::Tensor& dout, const at::Tensor& gate_up, Activation activation) const = 0;

  // Takes ownership of logits [rows, vocab], in the accumulator's dtype, to reuse or free their memory. The target -1
  // is ignored. `weights` [rows] is fp32; undefined: all are 1. `gradient` is the dtype of dlogits; nullopt: none.
  virtual CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, const at::Tensor& weights,
                                     double scale, std::optional<at::ScalarType> gradient) const = 0;
};

}  // namespace annulus
