// What kernels are made of: merging partial results, grouping tiles and heads, exponentials of rows, dropout's draws.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/cpu_flash/row_math.h"
#include "attention/tiles/dropout.h"
#include "attention/tiles/merge.h"
#include "attention/tiles/tile_groups.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Bounds are three to four times what eight seeds and three instruction sets showed at most. Scores of about 100 are
// rounded at 1.4e-14, those near 5000 at 9e-13, and parts of them err by as much as that.
constexpr double kOfHundreds = 5e-14;   // 1.5e-14 was seen
constexpr double kOfThousands = 3e-12;  // 9.1e-13

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
    EXPECT_LT((out - whole.out).abs().max().item<double>(), kOfHundreds);
    EXPECT_LT((lse - whole.lse).abs().max().item<double>(), kOfHundreds);
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

// What is merged are ratios: where all scores lie is of no matter, though no exponential of any of them is a number.
TEST(Merge, SumsFarBelowAndFarAboveZero) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  for (const double offset : {-5000.0, 5000.0}) {
    const at::Tensor scores = at::randn({1, 2, 5, 12}, options) + offset, values = at::randn({1, 2, 12, 4}, options);
    const Part whole = softmax_part(scores, values);
    std::vector<MergePart> parts;
    at::Tensor out = at::zeros({1, 2, 5, 4}, options), lse = at::full({1, 2, 5}, -kInfinity, options);
    for (int64_t p = 0; p < 3; ++p) {
      const Part part = softmax_part(scores.narrow(3, p * 4, 4), values.narrow(2, p * 4, 4));
      parts.push_back({part.out, part.lse, 0});
      merge_partial(out, lse, part.out, part.lse);
    }
    EXPECT_LT((out - whole.out).abs().max().item<double>(), kOfThousands) << offset;
    EXPECT_LT((lse - whole.lse).abs().max().item<double>(), kOfThousands) << offset;
    merge_parts(out, lse, {}, {}, parts);
    EXPECT_LT((out - whole.out).abs().max().item<double>(), kOfThousands) << offset;
    EXPECT_LT((lse - whole.lse).abs().max().item<double>(), kOfThousands) << offset;
  }
}

// Parts of some of the rows, several in one pass, after others or not, into a narrower dtype, and plain sums.
TEST(Merge, SeveralPartsAtOnceGiveTheWhole) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const int64_t n = 9;
  const at::Tensor scores = at::randn({2, 3, n, 20}, options) * 20, values = at::randn({2, 3, 20, 5}, options);
  at::Tensor shown = scores.clone();
  // Keys 4 p, ..., 4 p + 3 are part p's, which has rows first[p], ..., first[p] + count[p] - 1 alone.
  const std::vector<int64_t> first{0, 3, 0, 5, 2}, count{9, 4, 2, 4, 0};
  std::vector<MergePart> parts;
  for (size_t p = 0; p < 5; ++p) {
    const auto keys = [&](const at::Tensor& t) { return t.narrow(3, static_cast<int64_t>(p) * 4, 4); };
    keys(shown).narrow(2, 0, first[p]).fill_(-kInfinity);
    keys(shown).narrow(2, first[p] + count[p], n - first[p] - count[p]).fill_(-kInfinity);
    const Part part =
        softmax_part(keys(scores).narrow(2, first[p], count[p]), values.narrow(2, static_cast<int64_t>(p) * 4, 4));
    parts.push_back({part.out, part.lse, first[p]});
  }
  const Part whole = softmax_part(shown, values);
  const auto all = std::span<const MergePart>(parts);
  at::Tensor out = at::full({2, 3, n, 5}, NAN, options), lse = at::full({2, 3, n}, NAN, options);
  merge_parts(out, lse, {}, {}, all.first(3));
  merge_parts(out, lse, out, lse, all.subspan(3));
  EXPECT_LT((out - whole.out).abs().max().item<double>(), kOfHundreds);
  EXPECT_LT((lse - whole.lse).abs().max().item<double>(), kOfHundreds);
  // Without the part that has every row, some see nothing.
  merge_parts(out, lse, {}, {}, all.subspan(3, 1));
  EXPECT_TRUE(out.narrow(2, 0, 5).eq(0).all().item<bool>());
  EXPECT_TRUE(lse.narrow(2, 0, 5).eq(-kInfinity).all().item<bool>());
  EXPECT_TRUE(out.narrow(2, 5, 4).equal(parts[3].out));

  std::vector<MergePart> narrow;
  for (const MergePart& part : parts)
    narrow.push_back({part.out.to(at::kBFloat16), part.lse.to(at::kFloat), part.first});
  const at::Tensor wide = at::empty({2, 3, n, 5}), l = at::empty({2, 3, n});
  const at::Tensor final_out = at::empty({2, 3, n, 5}, at::TensorOptions().dtype(at::kBFloat16));
  merge_parts(wide, l, {}, {}, std::span(narrow).first(2));
  merge_parts(final_out, l, wide, l, std::span(narrow).subspan(2));
  EXPECT_LT((final_out.to(at::kDouble) - whole.out).abs().max().item<double>(), 0.05);

  at::Tensor sum = at::full({2, 3, n, 5}, NAN, options), want = at::zeros({2, 3, n, 5}, options);
  for (MergePart& part : parts) {
    part.lse = at::Tensor();
    want.narrow(2, part.first, part.out.size(2)).add_(part.out);
  }
  merge_parts(sum, {}, {}, {}, all.first(2));
  merge_parts(sum, {}, sum, {}, all.subspan(2));
  // Equal so far: four numbers at most. In another order a sum near 8 may differ by twice its last place.
  EXPECT_LT((sum - want).abs().max().item<double>(), 4e-15);
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

TEST(IndicesOf, APartOfABlockAndNothingElse) {
  const Span block{1, 3, 6};  // 1, 4, 7, 10, 13, 16
  EXPECT_EQ(indices_of(block, block, "kv heads"), Span::range(0, 6));
  EXPECT_EQ(indices_of({4, 6, 3}, block, "kv heads"), (Span{1, 2, 3}));
  EXPECT_EQ(indices_of({7, 1, 1}, block, "kv heads"), (Span{2, 1, 1}));  // the stride of one says nothing
  EXPECT_TRUE(indices_of({2, 1, 0}, block, "kv heads").empty());
  for (const Span& part : {Span{-2, 3, 2}, Span{13, 3, 3}, Span{5, 3, 2}, Span{4, 2, 4}, Span{17, 1, 1}}) {
    try {
      indices_of(part, block, "kv heads");
      ADD_FAILURE() << to_string(part);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find("kv heads " + to_string(part)), std::string::npos) << error.what();
    }
  }
}

TEST(TileGroups, TilesOfTheSameQueriesAreOneGroupAndLongOnesAreCut) {
  Tile tile;
  tile.batch = tile.heads = {0, 1, 1};
  tile.query_rows = tile.query_positions = {0, 1, 128};
  tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, 100};
  Tile other = tile, far = tile;
  other.query_rows = other.query_positions = {64, 1, 128};
  far.key_rows = far.key_positions = far.grad_rows = {300, 2, 50};
  const std::vector<Tile> tiles{tile, other, far};
  const auto groups = group_tiles(tiles, 1000);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].tiles.size(), 2u);
  EXPECT_EQ(groups[0].keys, 150);
  EXPECT_TRUE(share_queries(groups[0], groups[1]));
  const auto cut = group_tiles(std::vector<Tile>{far}, 40);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(cut[1].tiles[0].key_rows, (Span{380, 2, 10}));
  EXPECT_EQ(cut[1].tiles[0].grad_rows, (Span{380, 2, 10}));
}

// What each query sees of the keys, key by key, and which groups have a row in common.
TEST(TileGroups, KeysSeenAndSharedQueriesByCounting) {
  for (const int64_t stride : {1, 2, 5}) {
    for (const int64_t key_stride : {1, 3}) {
      const Span queries{7, stride, 4}, keys{2, key_stride, 9};
      for (int64_t lo = -30; lo <= 30; lo += 3) {
        for (const Band band : {Band{lo, lo + 4}, Band{-Band::kUnbounded, lo}, Band{lo, Band::kUnbounded}}) {
          Span want{0, 1, 0};
          for (int64_t j = 0; j < keys.count; ++j) {
            bool seen = false;
            for (int64_t i = 0; i < queries.count; ++i) seen |= band.contains(queries.at(i), keys.at(j));
            if (!seen) continue;
            if (want.empty()) want.begin = j;
            want.count = j + 1 - want.begin;
          }
          const Span got = keys_seen(queries, keys, band);
          // Where strides jump over a band it may name keys that no row sees, at the edges; never less than is seen.
          if (!want.empty()) {
            EXPECT_LE(got.begin, want.begin) << to_string(band);
            EXPECT_GE(got.begin + got.count, want.begin + want.count) << to_string(band);
          }
          const Span of_one = keys_seen(queries.sub(1, 1), keys, band);
          for (int64_t j = 0; j < keys.count; ++j) {
            EXPECT_EQ(of_one.contains(j), band.contains(queries.at(1), keys.at(j))) << j << " " << to_string(band);
          }
        }
      }
    }
  }
  const auto group = [](Span rows, Span heads, Span batch) {
    Tile tile;
    tile.query_rows = tile.query_positions = rows, tile.heads = heads, tile.batch = batch;
    tile.key_rows = tile.key_positions = {0, 1, 4};
    return tile;
  };
  const Tile tile = group({0, 2, 10}, {0, 1, 2}, {0, 1, 2});
  const std::vector<Tile> others{group({18, 1, 3}, {1, 1, 1}, {1, 1, 1}), group({1, 2, 10}, {0, 1, 2}, {0, 1, 2}),
                                 group({0, 2, 10}, {2, 1, 2}, {0, 1, 2}), group({0, 2, 10}, {0, 1, 2}, {2, 1, 1}),
                                 group({19, 1, 3}, {0, 1, 2}, {0, 1, 2}), group({0, 2, 10}, {0, 1, 2}, {2, 1, 2})};
  for (size_t i = 0; i < others.size(); ++i) {
    const auto groups = group_tiles(std::vector<Tile>{tile, others[i]}, 100);
    ASSERT_EQ(groups.size(), 2u) << i;
    EXPECT_EQ(share_queries(groups[0], groups[1]), i == 0) << i;
    EXPECT_EQ(share_queries(groups[1], groups[0]), i == 0) << i;
  }
}

// Rows of every length: full vectors and what is left over.
TEST(RowMath, MaximaSumsAndGradientsOfRowsOfAnyLength) {
  for (int64_t n = 1; n <= 70; ++n) {
    const at::Tensor scores = at::randn({n}) * 3, gradients = at::randn({n});
    const at::Tensor wide = scores.to(at::kDouble), p = (wide - 1.5).exp();
    const float most = scores.max().item<float>();
    EXPECT_EQ(row_max(scores.data_ptr<float>(), n, -1e30f), most) << n;
    EXPECT_EQ(row_max(scores.data_ptr<float>(), n, most + 1), most + 1) << n;
    const at::Tensor e = scores.clone(), q = scores.clone(), ds = gradients.clone();
    EXPECT_NEAR(row_exp(e.data_ptr<float>(), n, 1.5f) / p.sum().item<double>(), 1, 1e-6) << n;
    EXPECT_LT((e.to(at::kDouble) / p - 1).abs().max().item<double>(), 1e-6) << n;
    row_gradient(q.data_ptr<float>(), ds.data_ptr<float>(), n, 1.5f, 0.25f);
    EXPECT_TRUE(q.equal(e)) << n;
    const at::Tensor want = p * (gradients.to(at::kDouble) - 0.25);
    EXPECT_LT(((ds.to(at::kDouble) - want) / p).abs().max().item<double>(), 4e-6) << n;  // 1.2e-6 was seen
  }
}

TEST(RowMath, ExponentialsAreExactToTwoUnits) {
  for (float x = -86.9f; x < 88; x += 0.0137f) {
    float y = x;
    row_exp(&y, 1, 0);
    ASSERT_LT(std::abs(y / std::exp(static_cast<double>(x)) - 1), 2.4e-7) << x;
  }
  float odd[] = {-INFINITY, NAN, INFINITY, -200};
  row_exp(odd, 4, 0);
  EXPECT_EQ(odd[0], 0);
  EXPECT_TRUE(std::isnan(odd[1]));
  EXPECT_EQ(odd[2], INFINITY);
  EXPECT_EQ(odd[3], 0);
}

TEST(Dropout, FactorsAreTheSameHoweverTheyAreCut) {
  const Dropout dropout{0.4, 11, 2, 3, 6};
  const at::Tensor like = at::zeros({1}, at::TensorOptions().dtype(at::kDouble));
  const Span batch{0, 1, 3}, heads{0, 1, 4}, queries{5, 1, 40}, keys{3, 1, 50};
  const at::Tensor whole = dropout_factors(dropout, batch, heads, queries, keys, like);
  const at::Tensor part = dropout_factors(dropout, {1, 1, 2}, {1, 2, 2}, {7, 3, 9}, {6, 5, 8}, like);
  EXPECT_TRUE(part.equal(whole.slice(0, 1, 3).slice(1, 1, 4, 2).slice(2, 2, 27, 3).slice(3, 3, 39, 5)));
  Dropout shifted = dropout;  // the same global batch rows
  shifted.first_row = 7;
  EXPECT_TRUE(dropout_factors(shifted, {0, 1, 2}, heads, queries, keys, like).equal(whole.slice(0, 1, 3)));
  for (Dropout other : {Dropout{0.4, 12, 2, 3, 6}, Dropout{0.4, 11, 3, 3, 6}, Dropout{0.4, 11, 2, 4, 6}}) {
    EXPECT_FALSE(dropout_factors(other, batch, heads, queries, keys, like).equal(whole));
  }
}

TEST(Dropout, KeepsTheShareAskedFor) {
  const at::Tensor factors =
      dropout_factors({0.25, 1, 0, 0, 0}, {0, 1, 2}, {0, 1, 4}, {0, 1, 250}, {0, 1, 500}, at::zeros({1}));
  const int64_t kept = factors.ne(0).sum().item<int64_t>();
  EXPECT_NEAR(static_cast<double>(kept) / 1e6, 0.75, 0.002);  // 4.6 standard deviations
  EXPECT_FLOAT_EQ(factors.max().item<float>(), 1 / 0.75f);
}

}  // namespace
}  // namespace annulus
