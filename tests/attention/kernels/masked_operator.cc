// See masked_operator.h.
#include "tests/attention/kernels/masked_operator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "attention/tiles/dense.h"

namespace annulus::testing {
namespace {

at::Tensor mask(const Band& band, int64_t n, int64_t m) {
  const at::Tensor apart = at::arange(m).unsqueeze(0) - at::arange(n).unsqueeze(1);
  return apart.ge(band.lo).logical_and(apart.le(band.hi));
}

}  // namespace

AttentionOperator::Forward MaskedOperator::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const Band& band, double scale) const {
  expect_shapes(q, k, v, band);
  const auto part = dense_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                  mask(band, q.size(1), k.size(1)), {}, scale);
  return {part.out.transpose(1, 2), part.lse};
}

AttentionOperator::Backward MaskedOperator::backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v, const at::Tensor& out, const at::Tensor& lse,
                                                     const Band& band, double scale) const {
  expect_shapes(q, k, v, band);
  EXPECT_EQ(dout.sizes(), q.sizes());
  EXPECT_EQ(out.strides(), q.strides());  // plans that are cached by shape may depend on it
  EXPECT_EQ(dout.strides(), q.strides());
  EXPECT_EQ(lse.sizes(), (std::vector<int64_t>{q.size(0), q.size(2), q.size(1)}));
  EXPECT_TRUE(lse.is_contiguous());
  EXPECT_FALSE(lse.eq(-std::numeric_limits<double>::infinity()).any().item<bool>());
  const auto part = dense_backward(dout.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                   out.transpose(1, 2), lse, mask(band, q.size(1), k.size(1)), {}, scale);
  return {part.dq.transpose(1, 2), part.dk.transpose(1, 2), part.dv.transpose(1, 2)};
}

void MaskedOperator::expect_shapes(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const Band& band) const {
  EXPECT_EQ(q.size(3) % 8, 0);
  EXPECT_EQ(k.sizes(), v.sizes());
  EXPECT_EQ(q.size(2) % k.size(2), 0);
  EXPECT_EQ(q.stride(3), 1);
  EXPECT_EQ(k.stride(3), 1);
  const bool whole = band.unbounded_below() && band.unbounded_above();
  const bool causal = band.unbounded_below() && band.hi == 0 && q.size(1) == k.size(1);
  EXPECT_TRUE(whole || causal || (any_band_ && q.size(1) <= k.size(1)));
  EXPECT_TRUE(mask(band, q.size(1), k.size(1)).any(0).all().item<bool>());
  EXPECT_TRUE(mask(band, q.size(1), k.size(1)).any(1).all().item<bool>());
}

}  // namespace annulus::testing
