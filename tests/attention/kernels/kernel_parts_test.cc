// Tests of the parts of kernels: merging partial results, grouping tiles and heads, and the draws of dropout.
// tile_math_test.cc tests the vector code of flash attention on CPUs.
#include <ATen/TensorOperators.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/dropout/draws.h"
#include "attention/dropout/dropout.h"
#include "attention/oracle/oracle.h"
#include "attention/tiles/merge.h"
#include "attention/tiles/tile_groups.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"
#include "tests/common/exactness.h"

namespace annulus::kernel_parts_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Scores and log-sum-exps are rounded like sums of their size, which changes probabilities and weights by that share.
double terms(const at::Tensor& scores, const at::Tensor& values) {
  return (1 + testing::largest(scores)) * testing::largest(values);
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
    EXPECT_TRUE(testing::agrees(out, whole.out, terms(scores, values)));
    EXPECT_TRUE(testing::agrees(lse, whole.lse));
  }
}

TEST(Merge, IgnoresEmptyPartsAndDoesNotOverflow) {
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

// Merging uses ratios of exponentials, so an offset of all scores does not matter, even if the exponential of each
// score overflows or underflows.
TEST(Merge, ScoresFarFromZeroStayExact) {
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
    EXPECT_TRUE(testing::agrees(out, whole.out, terms(scores, values))) << offset;
    EXPECT_TRUE(testing::agrees(lse, whole.lse)) << offset;
    merge_parts(out, lse, {}, {}, parts);
    EXPECT_TRUE(testing::agrees(out, whole.out, terms(scores, values))) << offset;
    EXPECT_TRUE(testing::agrees(lse, whole.lse)) << offset;
  }
}

// Parts hold some rows, heads and batch rows, with strides, and are merged several in one pass, with or without earlier
// parts, into a narrower dtype, and as plain sums.
TEST(Merge, SeveralPartsAtOnceGiveTheWhole) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const int64_t n = 9;
  const at::Tensor scores = at::randn({2, 3, n, 20}, options) * 20, values = at::randn({2, 3, 20, 5}, options);
  const at::Tensor shown = at::full(scores.sizes(), -kInfinity, options);
  const Span both{0, 1, 2}, heads{0, 1, 3};
  const struct {
    Span batch, heads, rows;
  } places[] = {{both, heads, {0, 1, n}},
                {both, {0, 2, 2}, {3, 1, 4}},
                {{1, 1, 1}, heads, {0, 3, 3}},
                {both, heads, {5, 1, 4}},
                {both, heads, {2, 1, 0}}};
  const auto of_place = [&](const at::Tensor& t, const auto& place) {
    const auto members = [](const at::Tensor& of, int64_t d, const Span& s) {
      return of.slice(d, s.begin, s.begin + s.count * s.stride, s.stride).narrow(d, 0, s.count);
    };
    return members(members(members(t, 0, place.batch), 1, place.heads), 2, place.rows);
  };
  std::vector<MergePart> parts;  // part p has keys 4 p, ..., 4 p + 3 and the rows of its place
  for (size_t p = 0; p < 5; ++p) {
    const auto keys = [&](const at::Tensor& t, int64_t d) { return t.narrow(d, static_cast<int64_t>(p) * 4, 4); };
    const at::Tensor of_rows = of_place(keys(scores, 3), places[p]);
    of_place(keys(shown, 3), places[p]).copy_(of_rows);
    const at::Tensor v = values.slice(0, places[p].batch.begin, places[p].batch.last() + 1)
                             .slice(1, places[p].heads.begin, places[p].heads.last() + 1, places[p].heads.stride);
    const Part part = softmax_part(of_rows, keys(v, 2));
    parts.push_back({part.out, part.lse, places[p].batch, places[p].heads, places[p].rows});
  }
  const Part whole = softmax_part(shown, values);
  const auto all = std::span<const MergePart>(parts);
  at::Tensor out = at::full({2, 3, n, 5}, NAN, options), lse = at::full({2, 3, n}, NAN, options);
  merge_parts(out, lse, {}, {}, all.first(3));
  merge_parts(out, lse, out, lse, all.subspan(3));
  EXPECT_TRUE(testing::agrees(out, whole.out, terms(scores, values)));
  EXPECT_TRUE(testing::agrees(lse, whole.lse));
  // Without the part that has every row, some rows see no keys.
  merge_parts(out, lse, {}, {}, all.subspan(3, 1));
  EXPECT_TRUE(out.narrow(2, 0, 5).eq(0).all().item<bool>());
  EXPECT_TRUE(lse.narrow(2, 0, 5).eq(-kInfinity).all().item<bool>());
  EXPECT_TRUE(out.narrow(2, 5, 4).equal(parts[3].out));

  // Parts that are rounded to bf16 are off by at most 2^-8 of themselves, and so are their mean and its rounding.
  std::vector<MergePart> narrow;
  for (const MergePart& part : parts)
    narrow.push_back({part.out.to(at::kBFloat16), part.lse.to(at::kFloat), part.batch, part.heads, part.rows});
  const at::Tensor wide = at::empty({2, 3, n, 5}), l = at::empty({2, 3, n});
  const at::Tensor final_out = at::empty({2, 3, n, 5}, at::TensorOptions().dtype(at::kBFloat16));
  merge_parts(wide, l, {}, {}, std::span(narrow).first(2));
  merge_parts(final_out, l, wide, l, std::span(narrow).subspan(2));
  EXPECT_TRUE(testing::within(testing::error_of(final_out, whole.out),
                              (2 * testing::unit_roundoff(at::kBFloat16) + 0x1p-16) * testing::largest(values)));

  at::Tensor sum = at::full({2, 3, n, 5}, NAN, options), want = at::zeros({2, 3, n, 5}, options);
  for (MergePart& part : parts) {
    part.lse = at::Tensor();
    of_place(want, part).add_(part.out);
  }
  merge_parts(sum, {}, {}, {}, all.first(2));
  merge_parts(sum, {}, sum, {}, all.subspan(2));
  EXPECT_TRUE(testing::agrees(sum, want, 5 * testing::largest(values)));
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

TEST(IndicesOf, RefusesWhatIsNotPartOfTheBlock) {
  const Span block{1, 3, 6};  // 1, 4, 7, 10, 13, 16
  EXPECT_EQ(indices_of(block, block, "kv heads"), Span::range(0, 6));
  EXPECT_EQ(indices_of({4, 6, 3}, block, "kv heads"), (Span{1, 2, 3}));
  EXPECT_EQ(indices_of({7, 1, 1}, block, "kv heads"), (Span{2, 1, 1}));  // the stride of one element does not matter
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

TEST(TileGroups, GroupsTilesByQueriesAndCutsLongGroups) {
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
  const auto cut = group_tiles(std::vector<Tile>{far}, 40);
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_EQ(cut[1].tiles[0].key_rows, (Span{380, 2, 10}));
  EXPECT_EQ(cut[1].tiles[0].grad_rows, (Span{380, 2, 10}));
  Tile another_batch_row = tile, another_head = tile;
  another_batch_row.batch = another_head.heads = {1, 1, 1};
  EXPECT_EQ(group_tiles(std::vector<Tile>{tile, another_batch_row, another_head}, 1000).size(), 3u);
}

// Compares with counting key by key which keys each query sees.
TEST(TileGroups, SeenKeysMatchCounting) {
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
          // Where strides step over the band, the result may have keys at its edges that no row sees, but never lacks a
          // key.
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
}

// Compares with LibTorch's generator for keys that begin anywhere in a group of four, that are strided, or whose group
// numbers need more than 32 bits.
TEST(Dropout, DrawsEqualLibTorchsPhilox) {
  constexpr uint64_t kKey = 0x123456789abcdef0;
  const std::vector<Span> spans{
      {0, 1, 300}, {3, 1, 1}, {5, 1, 770}, {2, 7, 100}, {(int64_t{1} << 34) - 10, 1, 50}, {int64_t{1} << 40, 1, 100},
      {6, 2, 33}};
  for (const uint64_t threshold : {uint64_t{0}, uint64_t{1} << 31, uint64_t{1} << 32}) {
    for (const Span& keys : spans) {
      for (const int64_t query : {int64_t{0}, int64_t{7}, int64_t{1} << 33}) {
        std::vector<float> factors(static_cast<size_t>(keys.count));
        std::vector<double> wide(factors.size());
        draw_row(kKey, query, keys, threshold, 2.0f, factors.data());
        draw_row(kKey, query, keys, threshold, 1 / 0.3, wide.data());
        for (int64_t j = 0; j < keys.count; ++j) {
          at::Philox4_32 philox(kKey, static_cast<uint64_t>(query), static_cast<uint64_t>(keys.at(j) / 4));
          uint32_t words[4];
          for (uint32_t& word : words) word = philox();
          const bool stays = words[keys.at(j) % 4] >= threshold;
          ASSERT_EQ(factors[static_cast<size_t>(j)], stays ? 2.0f : 0.0f) << keys.at(j);
          ASSERT_EQ(wide[static_cast<size_t>(j)], stays ? 1 / 0.3 : 0.0) << keys.at(j);
        }
      }
    }
  }
}

TEST(Dropout, FactorsAreIndependentOfTiling) {
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

// Which pairs are dropped is defined by docs/explanation/attention.md, and the oracle has a generator of its own.
TEST(Dropout, FactorsAreThoseOfTheDefinition) {
  const int64_t far = int64_t{1} << 33;
  for (const Dropout& d : {Dropout{0.3, 11, 2, 3, 6}, Dropout{0.5, ~uint64_t{0}, far, 0, 0}, Dropout{1e-9, 1, 0, 7, 1},
                           Dropout{1 - 0x1p-32, 5, 1, 1, far}}) {
    const PairWeight want = weight_of({d.rate, d.seed, d.step, d.layer, d.first_row});
    const Span batch{0, 1, 2}, heads{1, 2, 2};
    for (const Span& queries : {Span{0, 1, 7}, Span{far, 3, 4}}) {
      for (const Span& keys : {Span{3, 1, 150}, Span{far + 2, 5, 40}}) {
        const at::Tensor got = dropout_factors(d, batch, heads, queries, keys, at::zeros({1}, at::kDouble));
        const double* factor = got.const_data_ptr<double>();
        for (int64_t b = 0; b < batch.count; ++b) {
          for (int64_t h = 0; h < heads.count; ++h) {
            for (int64_t i = 0; i < queries.count; ++i) {
              for (int64_t j = 0; j < keys.count; ++j) {
                ASSERT_EQ(*factor++, want(batch.at(b), heads.at(h), queries.at(i), keys.at(j)))
                    << d.rate << ", head " << heads.at(h) << ", query " << queries.at(i) << ", key " << keys.at(j);
              }
            }
          }
        }
      }
    }
  }
}

TEST(Dropout, KeepsTheRequestedShare) {
  const at::Tensor factors =
      dropout_factors({0.25, 1, 0, 0, 0}, {0, 1, 2}, {0, 1, 4}, {0, 1, 250}, {0, 1, 500}, at::zeros({1}));
  const int64_t kept = factors.ne(0).sum().item<int64_t>();
  // The draw of a seed never changes. Six standard deviations, of 1e6 draws, would be a chance of 2e-9.
  EXPECT_NEAR(static_cast<double>(kept) / 1e6, 0.75, 6 * std::sqrt(0.75 * 0.25 / 1e6));
  EXPECT_FLOAT_EQ(factors.max().item<float>(), 1 / 0.75f);
}

}  // namespace
}  // namespace annulus::kernel_parts_test
