// Attention on one rank, composed of LibTorch's operators. Tests use it instead of attention/execution.
#pragma once

#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>

#include "runtime/model/model.h"

namespace annulus {

// mask: bool [queries, keys], true where a query sees a key; without one a query sees the keys up to its own position.
inline Attend dense_masked(const std::optional<at::Tensor>& mask) {
  return [mask](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t) {
    const int64_t group = q.size(2) / k.size(2);
    const auto heads_first = [](const at::Tensor& t, int64_t repeat) {
      return t.transpose(1, 2).repeat_interleave(repeat, 1);
    };
    return at::scaled_dot_product_attention(heads_first(q, 1), heads_first(k, group), heads_first(v, group), mask, 0.0,
                                            /*is_causal=*/!mask.has_value())
        .transpose(1, 2)
        .contiguous();
  };
}

inline Attend dense_causal() { return dense_masked(std::nullopt); }

}  // namespace annulus
