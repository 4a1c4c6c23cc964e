// For tests of merging: parts of some batch rows, heads and rows, with strides, and how exact their sum must be. Used
// by merge_row_test.cc and gpu_kernel_test.cc.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/tiles/merge.h"
#include "tests/common/exactness.h"

namespace annulus::testing {

// The first `count` of eight parts of 2 batch rows, 3 heads and 60 rows, the last of which are in no part. They have
// the layout of operators, [b, n, h, D]; every third row has no key. With `sums` they have no lse.
inline std::vector<MergePart> parts_of_some_rows(at::ScalarType type, int64_t dim, bool sums, size_t count) {
  const Span both{0, 1, 2}, all{0, 1, 3};
  const struct {
    Span batch, heads, rows;
  } places[] = {
      {both, all, {0, 1, 50}}, {both, {1, 1, 2}, {20, 1, 30}},
      {both, all, {0, 1, 7}},  {{1, 1, 1}, all, {40, 1, 10}},
      {both, all, {3, 1, 0}},  {both, {0, 2, 2}, {2, 5, 9}},
      {both, all, {1, 7, 8}},  {{0, 1, 1}, {2, 1, 1}, {9, 3, 9}},
  };
  const auto options = at::TensorOptions().dtype(type == at::kDouble ? at::kDouble : at::kFloat);
  std::vector<MergePart> parts;
  for (size_t p = 0; p < count; ++p) {
    const auto& [batch, heads, rows] = places[p];
    const at::Tensor out = at::randn({batch.count, rows.count, heads.count, dim}, options).to(type);
    const at::Tensor lse = at::randn({batch.count, heads.count, rows.count}, options) * 9;
    lse.slice(2, 0, rows.count, 3).fill_(-std::numeric_limits<double>::infinity());
    parts.push_back({out.transpose(1, 2), sums ? at::Tensor() : lse, batch, heads, rows});
  }
  return parts;
}

inline at::Tensor widened(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

inline std::vector<MergePart> widened(std::vector<MergePart> parts) {
  for (MergePart& part : parts) part.out = widened(part.out), part.lse = widened(part.lse);
  return parts;
}

struct Merged {
  at::Tensor out, lse;  // lse is undefined for sums
};

// Whether parts, one of which may be what was held before, are merged as exactly as by `usual`, another implementation
// in the same dtypes; `exact` is a result in fp64. A weight is the exponential of a difference of log-sum-exps, whose
// rounding changes it by that share.
inline ::testing::AssertionResult as_exact(const Merged& got, const Merged& usual, const Merged& exact,
                                           const std::vector<MergePart>& parts) {
  double values = 0, lse = 0, sum = 0;
  for (const MergePart& part : parts) {
    values = std::max(values, largest(part.out)), sum += largest(part.out);
    if (part.lse.defined()) lse = std::max(lse, largest(part.lse));
  }
  const auto one = [](const at::Tensor& g, const at::Tensor& u, const at::Tensor& e, double terms) {
    return u.scalar_type() == at::kDouble ? agrees(g, e, terms) : as_exact_as(g, u, e, terms);
  };
  const auto of_out = one(got.out, usual.out, exact.out, exact.lse.defined() ? values * (1 + lse) : sum);
  return of_out && exact.lse.defined() ? one(got.lse, usual.lse, exact.lse, 1 + lse) : of_out;
}

}  // namespace annulus::testing
