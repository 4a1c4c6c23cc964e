// Merging partial results, grouping heads.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <limits>

#include "attention/kernels/merge.h"
#include "attention/kernels/tile_views.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Part {
  at::Tensor out, lse;
};

Part softmax_part(const at::Tensor& scores, const at::Tensor& values) {
  const at::Tensor lse = scores.logsumexp({-1});
  return {(scores - lse.unsqueeze(-1)).exp().matmul(values), lse};
}

TEST(Merge, AnyOrderOfPartsGivesTheWhole) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor scores = at::randn({2, 3, 5, 12}, options) * 30, values = at::randn({2, 3, 12, 4}, options);
  const Part whole = softmax_part(scores, values);
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}) {
    at::Tensor out = at::full({2, 3, 5, 4}, 7.0, options), lse = at::full({2, 3, 5}, -kInfinity, options);
    for (const int part : order) {
      const Part p = softmax_part(scores.slice(3, part * 4, part * 4 + 4), values.slice(2, part * 4, part * 4 + 4));
      merge_partial(out, lse, p.out, p.lse);
    }
    EXPECT_LT((out - whole.out).abs().max().item<double>(), 1e-12);
    EXPECT_LT((lse - whole.lse).abs().max().item<double>(), 1e-12);
  }
}

TEST(Merge, EmptyPartsChangeNothingAndHugeDifferencesDoNotOverflow) {
  const auto options = at::TensorOptions().dtype(at::kFloat);
  at::Tensor out = at::full({1, 1, 2, 3}, 2.0, options), lse = at::zeros({1, 1, 2}, options);
  const at::Tensor nothing = at::full({1, 1, 2, 3}, NAN, options);
  merge_partial(out, lse, nothing, at::full({1, 1, 2}, -kInfinity, options));
  EXPECT_TRUE((out == 2.0).all().item<bool>());
  EXPECT_TRUE((lse == 0).all().item<bool>());
  merge_partial(out, lse, at::full({1, 1, 2, 3}, 5.0, options), at::full({1, 1, 2}, 1e4, options));
  EXPECT_TRUE((out == 5.0).all().item<bool>());
  EXPECT_TRUE((lse == 1e4).all().item<bool>());
  merge_partial(out, lse, at::full({1, 1, 2, 3}, 1.0, options), at::full({1, 1, 2}, -1e4, options));
  EXPECT_TRUE((out == 5.0).all().item<bool>());
}

TEST(HeadGroups, KeepHeadsOfOneKvHeadTogether) {
  const auto whole = head_groups({0, 1, 8}, 4);
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].kv, (Span{0, 1, 2}));
  const auto ragged = head_groups({2, 1, 4}, 4);  // heads 2, 3 read kv 0; 4, 5 read kv 1
  ASSERT_EQ(ragged.size(), 2u);
  EXPECT_EQ(ragged[0].query, (Span{2, 1, 2}));
  EXPECT_EQ(ragged[1].kv, (Span{1, 1, 1}));
  const auto strided = head_groups({1, 3, 3}, 4);  // 1 | 4, 7
  ASSERT_EQ(strided.size(), 2u);
  EXPECT_EQ(strided[1].query, (Span{4, 3, 2}));
}

}  // namespace
}  // namespace annulus
