// Attention on one rank, composed of LibTorch's operators. Tests use it instead of attention/execution.
#pragma once

#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <optional>
#include <vector>

#include "runtime/model/model.h"

namespace annulus {

// mask: bool [queries, keys], true where a query sees a key; undefined: a query sees the keys up to its own position.
inline Attend dense_masked(const at::Tensor& mask) {
  const auto compute = [mask](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const int64_t group = q.size(2) / k.size(2);
    const auto heads_first = [](const at::Tensor& t, int64_t repeat) {
      return t.transpose(1, 2).repeat_interleave(repeat, 1);
    };
    return at::scaled_dot_product_attention(heads_first(q, 1), heads_first(k, group), heads_first(v, group),
                                            mask.defined() ? std::make_optional(mask) : std::nullopt, 0.0,
                                            /*is_causal=*/!mask.defined())
        .transpose(1, 2)
        .contiguous();
  };
  return [compute](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t, const at::Tensor&) {
    return Attended{.kept = {compute(q, k, v)},
                    .backward = [compute](const at::Tensor& dout, const Heads& of, const std::vector<at::Tensor>&) {
                      const c10::AutoGradMode with_gradients(true);
                      const std::vector<at::Tensor> in = {of.q.detach().requires_grad_(),
                                                          of.k.detach().requires_grad_(),
                                                          of.v.detach().requires_grad_()};
                      const auto d = torch::autograd::grad({compute(in[0], in[1], in[2])}, in, {dout});
                      return Heads{d[0], d[1], d[2]};
                    }};
  };
}

inline Attend dense_causal() { return dense_masked({}); }

}  // namespace annulus
