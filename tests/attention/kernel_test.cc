// Cutting bands into rectangles, merging partial results, grouping heads.
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
#include <map>

#include "attention/kernels/band_cut.h"
#include "attention/kernels/merge.h"
#include "attention/kernels/tile_views.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void check_cut(const Tile& tile, int64_t max_rows) {
  std::map<std::pair<int64_t, int64_t>, int> got;
  for (const Rectangle& r : cut_band(tile, max_rows)) {
    RC_ASSERT(r.queries.count > 0 && r.keys.count > 0);  // LibTorch's operator dies for zero rows
    RC_ASSERT(r.queries.count <= max_rows);
    if (r.mask == Rectangle::Mask::kUpper) RC_ASSERT(r.queries.count == r.keys.count);
    if (r.mask == Rectangle::Mask::kBanded) {
      RC_ASSERT(r.queries.count <= Rectangle::kMaskedSide && r.keys.count <= Rectangle::kMaskedSide);
    }
    for (int64_t i = 0; i < r.queries.count; ++i) {
      for (int64_t j = 0; j < r.keys.count; ++j) {
        const int64_t q = r.queries.at(i), k = r.keys.at(j);
        const bool shown = r.mask == Rectangle::Mask::kFull || (r.mask == Rectangle::Mask::kLower && j <= i) ||
                           (r.mask == Rectangle::Mask::kUpper && j >= i) ||
                           (r.mask == Rectangle::Mask::kBanded &&
                            tile.band.contains(tile.query_positions.at(q), tile.key_positions.at(k)));
        if (shown) ++got[{q, k}];
      }
    }
  }
  std::map<std::pair<int64_t, int64_t>, int> want;
  for (int64_t i = 0; i < tile.query_rows.count; ++i) {
    for (int64_t j = 0; j < tile.key_rows.count; ++j) {
      if (tile.band.contains(tile.query_positions.at(i), tile.key_positions.at(j))) want[{i, j}] = 1;
    }
  }
  RC_ASSERT(got == want);
}

Tile tile_of(Span queries, Span keys, Band band) {
  Tile tile;
  tile.query_rows = Span::range(0, queries.count);
  tile.key_rows = Span::range(0, keys.count);
  tile.query_positions = queries;
  tile.key_positions = keys;
  tile.band = band;
  return tile;
}

RC_GTEST_PROP(BandCut, HoldsEachPairOnce, ()) {
  const bool large = *rc::gen::inRange(0, 4) == 0;  // beyond what one mask may cover
  const int64_t most = large ? 700 : 40;
  const int64_t stride = *rc::gen::inRange(1, 4);
  const Span queries{*rc::gen::inRange<int64_t>(0, most), stride, *rc::gen::inRange<int64_t>(1, most)};
  const Span keys{*rc::gen::inRange<int64_t>(0, most), *rc::gen::inRange(0, 4) == 0 ? stride + 1 : stride,
                  *rc::gen::inRange<int64_t>(1, most)};
  Band band;
  if (*rc::gen::arbitrary<bool>()) band.lo = *rc::gen::inRange<int64_t>(-2 * most, most);
  if (*rc::gen::arbitrary<bool>()) band.hi = *rc::gen::inRange<int64_t>(-most, 2 * most);
  check_cut(tile_of(queries, keys, band), *rc::gen::element<int64_t>(1 << 20, 300, 64, 7));
}

TEST(BandCut, ACausalSquareIsOneCall) {
  const auto cut = cut_band(tile_of({0, 1, 1000}, {0, 1, 1000}, {-Band::kUnbounded, 0}), 1 << 20);
  ASSERT_EQ(cut.size(), 1u);
  EXPECT_EQ(cut[0].mask, Rectangle::Mask::kLower);
}

TEST(BandCut, ALongWindowNeedsNoMask) {
  for (const Rectangle& r : cut_band(tile_of({0, 1, 8192}, {0, 1, 8192}, {-1023, 0}), 1 << 20)) {
    EXPECT_NE(r.mask, Rectangle::Mask::kBanded);
  }
}

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
