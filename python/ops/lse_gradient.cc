// Implements lse_gradient.h.
#include "python/ops/lse_gradient.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace annulus::torch_ops {
namespace {

using at::Tensor;

// As many as keep a head size a multiple of 8, which the operators of GPUs want, or of 2, for the CPU's pairs of bf16.
constexpr int64_t kColumns = 8;
constexpr int64_t kParts = 3;  // of which so many hold dlse

// The tensor with kColumns more: `filled` of them with this value, the others 0.
Tensor widened(const Tensor& t, int64_t filled, double value) {
  if (!t.defined() || t.dim() < 2) return t;  // the plan keeps no keys and values
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() = kColumns;
  const Tensor more = at::zeros(sizes, t.options());
  more.narrow(-1, 0, filled).fill_(value);
  return at::cat({t, more}, -1);
}

}  // namespace

BackwardTensors with_lse_gradient(const BackwardTensors& given, const Tensor& dlse) {
  const auto zeros = [](const Tensor& t) { return widened(t, 0, 0); };
  const auto ones = [](const Tensor& t) { return widened(t, kParts, 1); };
  BackwardTensors wide{zeros(given.dout), zeros(given.q), zeros(given.k), ones(given.v), given.forward};
  wide.forward.out = zeros(given.forward.out);
  wide.forward.saved_k = zeros(given.forward.saved_k);
  wide.forward.saved_v = ones(given.forward.saved_v);
  if (!dlse.defined()) return wide;
  // The lse of a query without keys does not change with its scores, whatever the loss makes of -inf.
  const Tensor& lse = given.forward.lse;
  Tensor rest = dlse.masked_fill(lse.eq(-std::numeric_limits<double>::infinity()), 0).transpose(1, 2);  // [B, n, H]
  for (int64_t i = 0; i < kParts; ++i) {
    const Tensor part = wide.dout.select(-1, given.dout.size(-1) + i).copy_(rest);
    rest = rest - part.to(rest.scalar_type());
  }
  return wide;
}

}  // namespace annulus::torch_ops
