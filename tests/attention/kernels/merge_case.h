// Parts for tests of merging: of some batch rows, heads and rows, with strides. Used by merge_row_test.cc and
// gpu_kernel_test.cc.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>

#include <limits>
#include <vector>

#include "attention/tiles/merge.h"

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

}  // namespace annulus::testing
