// The decoder's operations as nodes of autograd, so that tests can compare their gradients with LibTorch's. The model
// calls them without autograd (runtime/model/decoder_layer.cc).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>

#include "attention/modules/rotary.h"
#include "runtime/model/choose_ops.h"
#include "runtime/model/decoder_ops.h"

namespace annulus::testing {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

class HeadNorm : public Function<HeadNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& q_weight,
                            const at::Tensor& k_weight, int64_t heads, int64_t kv_heads, double eps, double offset) {
    const HeadNormed r =
        ops_for({qkv, q_weight, k_weight}).head_norm(qkv, {q_weight, offset}, {k_weight, offset}, heads, kv_heads, eps);
    ctx->save_for_backward({qkv, q_weight, k_weight, r.inv_rms});
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["offset"] = offset;
    return r.y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &qkv = saved[0], &q_weight = saved[1], &k_weight = saved[2], &inv_rms = saved[3];
    const at::Tensor dy = grads[0].contiguous();
    const double offset = ctx->saved_data["offset"].toDouble();
    const HeadNormGradient g = ops_for({qkv, q_weight, k_weight, dy})
                                   .head_norm_backward(dy, qkv, {q_weight, offset}, {k_weight, offset}, inv_rms,
                                                       ctx->saved_data["heads"].toInt());
    return {g.dqkv, g.dq_weight, g.dk_weight, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class RotarySplit : public Function<RotarySplit> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& cosine,
                               const at::Tensor& sine, int64_t heads, int64_t kv_heads) {
    const Heads to = ops_for_rotation(qkv, cosine, sine).rotary_split(qkv, cosine, sine, heads, kv_heads);
    ctx->save_for_backward({cosine, sine});
    return {to.q, to.k, to.v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &cosine = saved[0], &sine = saved[1];
    const Heads gradients{grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()};
    return {ops_for_rotation(gradients.q, cosine, sine).rotary_split_backward(gradients, cosine, sine), at::Tensor(),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class Glu : public Function<Glu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up, Activation activation) {
    ctx->save_for_backward({gate_up});
    ctx->saved_data["activation"] = static_cast<int64_t>(activation);
    return ops_for({gate_up}).glu(gate_up, activation);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const at::Tensor dout = grads[0].contiguous();
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    return {ops_for({gate_up, dout}).glu_backward(dout, gate_up, activation), at::Tensor()};
  }
};

inline at::Tensor head_norm(const at::Tensor& qkv, const at::Tensor& q_weight, const at::Tensor& k_weight,
                            int64_t heads, int64_t kv_heads, double eps, double offset = 0) {
  return HeadNorm::apply(qkv, q_weight, k_weight, heads, kv_heads, eps, offset);
}

inline Heads rotary_split(const at::Tensor& qkv, const RotaryTable& table, int64_t heads, int64_t kv_heads) {
  const variable_list out = RotarySplit::apply(qkv, table.cosine, table.sine, heads, kv_heads);
  return {out[0], out[1], out[2]};
}

inline at::Tensor swiglu(const at::Tensor& gate_up) { return Glu::apply(gate_up, Activation::kSilu); }
inline at::Tensor geglu(const at::Tensor& gate_up) { return Glu::apply(gate_up, Activation::kGeluTanh); }

}  // namespace annulus::testing
