// Tests of how tiles are divided for library operators: every counted pair is in exactly one rectangle, one triangle
// and one call.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>

#include "attention/kernels/composition.h"
#include "attention/kernels/rectangles.h"

namespace annulus::rectangles_test {
namespace {

using Pairs = std::map<std::pair<int64_t, int64_t>, int>;  // (query row, key row) -> number of times

void add_pairs(const Rectangle& r, Pairs& pairs) {
  const int64_t n = r.query_rows.count, m = r.key_rows.count;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m; ++j) {
      if (!r.band.contains(i, j)) continue;
      ++pairs[{r.query_rows.at(r.reversed ? n - 1 - i : i), r.key_rows.at(r.reversed ? m - 1 - j : j)}];
    }
  }
}

Pairs pairs_of(const Tile& t) {
  Pairs pairs;
  for (int64_t i = 0; i < t.query_rows.count; ++i) {
    for (int64_t j = 0; j < t.key_rows.count; ++j) {
      if (t.band.contains(t.query_positions.at(i), t.key_positions.at(j))) {
        ++pairs[{t.query_rows.at(i), t.key_rows.at(j)}];
      }
    }
  }
  return pairs;
}

Band any_band(int64_t reach) {
  const bool below = *rc::gen::arbitrary<bool>(), above = *rc::gen::arbitrary<bool>();
  Band band;
  if (below) band.lo = *rc::gen::inRange<int64_t>(-reach, reach);
  if (above) band.hi = *rc::gen::inRange<int64_t>(below ? band.lo : -reach, reach + 1);
  return band;
}

Span any_span(int64_t most, int64_t strides) {
  return {*rc::gen::inRange<int64_t>(0, 9), *rc::gen::inRange<int64_t>(1, strides + 1),
          *rc::gen::inRange<int64_t>(1, most + 1)};
}

// A tile with as many rows as positions; the rows may be anywhere.
Tile any_tile(int64_t most, int64_t strides) {
  Tile t;
  t.batch = t.heads = {0, 1, 1};
  t.query_positions = any_span(most, strides);
  t.key_positions = any_span(most, strides);
  t.query_rows = {*rc::gen::inRange<int64_t>(0, 5), *rc::gen::inRange<int64_t>(1, 3), t.query_positions.count};
  t.key_rows = {*rc::gen::inRange<int64_t>(0, 5), *rc::gen::inRange<int64_t>(1, 3), t.key_positions.count};
  t.band = any_band(most * strides);
  return t;
}

RC_GTEST_PROP(Rectangles, HoldEachPairOfATileOnce, ()) {
  const Tile tile = any_tile(30, 4);
  const auto rectangles = rectangles_of(tile);
  RC_ASSERT(rectangles.has_value());
  Pairs pairs;
  for (const Rectangle& r : *rectangles) {
    add_pairs(r, pairs);
    const int64_t n = r.query_rows.count, m = r.key_rows.count;
    RC_ASSERT(r.whole() || n <= m);
    for (int64_t i = 0; i < n; ++i) {  // every row and every key has a pair
      RC_ASSERT(std::max<int64_t>(0, i + std::max(r.band.lo, -n)) <= std::min(m - 1, i + std::min(r.band.hi, m)));
    }
    for (int64_t j = 0; j < m; ++j) {
      RC_ASSERT(std::max<int64_t>(0, j - std::min(r.band.hi, m)) <= std::min(n - 1, j - std::max(r.band.lo, -n)));
    }
  }
  RC_ASSERT(pairs == pairs_of(tile));
}

RC_GTEST_PROP(Rectangles, TrianglesHoldEachPairOnce, ()) {
  Tile tile = any_tile(40, 1);
  Pairs pairs;
  const auto rectangles = rectangles_of(tile);
  for (const Rectangle& r : *rectangles) {
    for (const Rectangle& piece : triangles_of(r)) {
      RC_ASSERT(piece.whole() || (piece.lower_triangle() && piece.query_rows.count == piece.key_rows.count));
      add_pairs(piece, pairs);
    }
  }
  RC_ASSERT(pairs == pairs_of(tile));
}

TEST(Rectangles, DeclinesTilesThatTakeTooManyRectangles) {
  Tile tile;
  tile.batch = tile.heads = {0, 1, 1};
  tile.query_rows = tile.query_positions = {0, 101, 200};
  tile.key_rows = tile.key_positions = {0, 103, 200};
  EXPECT_EQ(rectangles_of(tile)->size(), 1u);  // without a band, strides do not matter
  tile.band = {-1000, 0};
  EXPECT_FALSE(rectangles_of(tile).has_value());
}

TEST(Rectangles, WindowTakesFewShapes) {
  Tile tile;
  tile.batch = tile.heads = {0, 1, 1};
  tile.query_rows = tile.query_positions = tile.key_rows = tile.key_positions = {0, 1, 4096};
  tile.band = {-127, 0};
  std::map<std::tuple<int64_t, int64_t, int64_t>, int> shapes;
  for (const Rectangle& r : triangles_of((*rectangles_of(tile))[0])) {
    ++shapes[{r.query_rows.count, r.key_rows.count, r.band.hi}];
  }
  EXPECT_LE(shapes.size(), 5u);  // including those of the first rows
}

// (query row of [B, rows, H], key row of [b, rows, h]) -> number of times.
using HeadPairs = std::map<std::tuple<int64_t, int64_t, int64_t, int64_t>, int>;  // batch, head, query row, key row

// Expects each pair in as many calls as the tiles count it, with its batch row and heads. The gradients are in the rows
// 100 after those of their keys.
void expect_each_pair_once(std::span<const Tile> tiles, const CompositionInput& in) {
  const bool backward = in.grads.rows > 0;
  HeadPairs want;
  for (const Tile& t : tiles) {
    for (const auto& [pair, times] : pairs_of(t)) {
      for (int64_t b = 0; b < t.batch.count; ++b) {
        for (int64_t h = 0; h < t.heads.count; ++h) {
          want[{t.batch.at(b), t.heads.at(h), pair.first, pair.second}] += times;
        }
      }
    }
  }
  const Composition composition = compose(tiles, in);
  HeadPairs got;
  for (const DirectCall& c : composition.direct) {
    RC_ASSERT(!c.rectangle.reversed);
    RC_ASSERT(in.any_band || c.rectangle.whole() || c.rectangle.lower_triangle());
    Pairs pairs;
    add_pairs(c.rectangle, pairs);
    for (const auto& [pair, times] : pairs) {
      for (int64_t b = 0; b < c.batch.count; ++b) {
        for (int64_t h = 0; h < c.heads.query.count; ++h) {
          RC_ASSERT(c.heads.kv.contains(c.heads.query.at(h) / in.group));
          got[{c.batch.at(b), c.heads.query.at(h), pair.first, pair.second}] += times;
        }
      }
    }
  }
  for (const GatherCall& c : composition.gathered) {
    RC_ASSERT(in.any_band || (c.band.unbounded_below() && (c.band.unbounded_above() || c.band.hi == 0)));
    RC_ASSERT(static_cast<int64_t>(c.query_rows.size()) == c.count * c.queries);
    RC_ASSERT(static_cast<int64_t>(c.key_rows.size()) == c.count * c.keys);
    RC_ASSERT(c.count == 1 || c.count * std::max(c.queries, c.keys) * c.heads <= in.most_gathered);
    std::vector<int64_t> sorted = c.query_rows;
    std::sort(sorted.begin(), sorted.end());
    RC_ASSERT(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
    const int64_t wide = in.heads / c.heads, kv_wide = in.keys.heads.count / c.kv_heads;
    for (int64_t p = 0; p < c.count; ++p) {
      for (int64_t j = 0; j < c.keys; ++j) {
        const int64_t key = c.key_rows[static_cast<size_t>(p * c.keys + j)], k_row = key / kv_wide % in.keys.rows;
        if (backward) {  // the same head and batch row, 100 rows further
          const int64_t grad = c.grad_rows[static_cast<size_t>(p * c.keys + j)];
          RC_ASSERT(grad / kv_wide % in.grads.rows == k_row + 100);
          RC_ASSERT(grad % kv_wide == key % kv_wide);
          RC_ASSERT(grad / kv_wide / in.grads.rows == key / kv_wide / in.keys.rows);
        }
        for (int64_t i = 0; i < c.queries; ++i) {
          if (!c.band.contains(i, j)) continue;
          const int64_t query = c.query_rows[static_cast<size_t>(p * c.queries + i)];
          RC_ASSERT(key / kv_wide / in.keys.rows == query / wide / in.rows);  // both rows are of one batch row
          for (int64_t h = 0; h < c.heads; ++h) {
            const int64_t head = query % wide * c.heads + h;
            RC_ASSERT(key % kv_wide * c.kv_heads + h / (c.heads / c.kv_heads) == head / in.group);
            ++got[{query / wide / in.rows, head, query / wide % in.rows, k_row}];
          }
        }
      }
    }
  }
  RC_ASSERT(composition.dense.empty());
  RC_ASSERT(got == want);
}

RC_GTEST_PROP(Composition, HoldsEachPairOfTheTilesOnce, ()) {
  CompositionInput in;
  in.group = *rc::gen::element<int64_t>(1, 2, 4);
  in.heads = in.group * *rc::gen::inRange<int64_t>(1, 4);
  in.rows = 100;
  in.any_band = *rc::gen::arbitrary<bool>();
  in.fill = *rc::gen::element<int64_t>(1, 2, 1 << 20);
  in.most_gathered = *rc::gen::element<int64_t>(1, 64, 1 << 20);
  const int64_t batch = 2;
  in.keys = {{0, 1, batch}, {0, 1, in.heads / in.group}, 90};
  const bool backward = *rc::gen::arbitrary<bool>();
  if (backward) in.grads = {{0, 1, batch}, {0, 1, in.heads / in.group}, 190};
  std::vector<Tile> tiles(*rc::gen::inRange<size_t>(1, 8));
  for (Tile& t : tiles) {
    t = any_tile(20, 2);
    if (*rc::gen::arbitrary<bool>()) t.band = {};
    t.grad_rows = backward ? Span{t.key_rows.begin + 100, t.key_rows.stride, t.key_rows.count} : Span{};
    const int64_t first = *rc::gen::inRange<int64_t>(0, in.heads), step = *rc::gen::inRange<int64_t>(1, 3);
    t.heads = {first, step, *rc::gen::inRange<int64_t>(1, (in.heads - first - 1) / step + 2)};
    t.batch = *rc::gen::arbitrary<bool>() ? Span{0, 1, 2} : Span{1, 1, 1};
  }
  expect_each_pair_once(tiles, in);
}

// Consecutive triangles along the diagonal, and the rectangles between them, may become one call only if they have the
// same heads and batch rows.
RC_GTEST_PROP(Composition, JoinsNeighboursOfTheSameHeadsAndBatchRowsOnly, ()) {
  CompositionInput in;
  in.group = 2, in.heads = 4, in.rows = 100;
  in.any_band = *rc::gen::arbitrary<bool>();
  in.fill = *rc::gen::element<int64_t>(1, 1 << 20);
  in.keys = {{0, 1, 2}, {0, 1, 2}, 100};
  if (*rc::gen::arbitrary<bool>()) in.grads = {{0, 1, 2}, {0, 1, 2}, 200};
  std::vector<Tile> tiles(*rc::gen::inRange<size_t>(3, 12));
  for (size_t i = 0; i < tiles.size(); ++i) {
    Tile& t = tiles[i];
    int64_t key = *rc::gen::inRange<int64_t>(0, 3), query = *rc::gen::inRange<int64_t>(key, 3);
    if (i < 3) key = i / 2, query = (i + 1) / 2;  // a triangle, the rectangle below it, and the next triangle
    t.query_rows = t.query_positions = {query * 10, 1, 10};
    t.key_rows = t.key_positions = {key * 10, 1, 10};
    if (query == key) t.band.hi = 0;
    if (in.grads.rows > 0) t.grad_rows = {t.key_rows.begin + 100, 1, 10};
    t.heads = *rc::gen::element(Span{0, 1, 2}, Span{2, 1, 2}, Span{0, 1, 4});
    t.batch = *rc::gen::element(Span{0, 1, 1}, Span{1, 1, 1}, Span{0, 1, 2});
    if (i == 1) t.heads = tiles[0].heads, t.batch = tiles[0].batch;
  }
  expect_each_pair_once(tiles, in);
}

TEST(Composition, DoesNotJoinTrianglesOfOtherHeadsOrBatchRows) {
  CompositionInput in;
  in.group = 2, in.heads = 4, in.rows = 100, in.fill = 1;
  in.keys = {{0, 1, 2}, {0, 1, 2}, 100};
  const auto tile = [](int64_t query, int64_t key, Span heads, Span batch) {
    Tile t;
    t.batch = batch, t.heads = heads;
    t.query_rows = t.query_positions = {query * 10, 1, 10};
    t.key_rows = t.key_positions = {key * 10, 1, 10};
    if (query == key) t.band.hi = 0;
    return t;
  };
  const Span heads{0, 1, 2}, others{2, 1, 2}, batch{0, 1, 1}, other{1, 1, 1};
  const auto calls = [&](const Span& h, const Span& b) {
    const std::vector<Tile> tiles{tile(0, 0, heads, batch), tile(1, 0, heads, batch), tile(1, 1, h, b)};
    expect_each_pair_once(tiles, in);
    return compose(tiles, in).direct.size();
  };
  EXPECT_EQ(calls(heads, batch), 1u);
  EXPECT_EQ(calls(others, batch), 3u);
  EXPECT_EQ(calls(heads, other), 3u);
}

// In zigzag, a rank's own keys are two chunks that are far apart in the sequence and adjacent in storage.
TEST(Composition, JoinsTrianglesAlongTheDiagonal) {
  CompositionInput in;
  in.rows = 300, in.heads = 4, in.group = 2, in.fill = 1;
  in.keys = {{0, 1, 1}, {0, 1, 2}, 300};
  in.grads = {{0, 1, 1}, {0, 1, 2}, 310};
  const auto tile = [](int64_t q, int64_t k, bool causal) {
    Tile t;
    t.batch = {0, 1, 1}, t.heads = {0, 1, 4};
    t.query_rows = {q * 100, 1, 100}, t.key_rows = {k * 100, 1, 100}, t.grad_rows = {10 + k * 100, 1, 100};
    t.query_positions = {q * 700, 1, 100}, t.key_positions = {k * 700, 1, 100};
    if (causal) t.band.hi = 0;
    return t;
  };
  std::vector<Tile> tiles{tile(2, 2, true),  tile(1, 0, false), tile(0, 0, true),
                          tile(2, 0, false), tile(1, 1, true),  tile(2, 1, false)};
  Composition composition = compose(tiles, in);
  int64_t triangles = 0, pairs = 0;
  for (const DirectCall& c : composition.direct) {
    const int64_t n = c.rectangle.query_rows.count, m = c.rectangle.key_rows.count;
    triangles += c.rectangle.lower_triangle();
    pairs += c.rectangle.whole() ? n * m : n * (n + 1) / 2;
  }
  EXPECT_EQ(pairs, 3 * 5050 + 3 * 10000);
  EXPECT_EQ(triangles, 1);  // the rectangle beside the third triangle, in two parts at first, is joined as well
  EXPECT_EQ(composition.direct.size(), 1u);
  tiles.resize(3);
  tiles[0] = tile(1, 1, true);
  composition = compose(tiles, in);
  ASSERT_EQ(composition.direct.size(), 1u);
  EXPECT_EQ(composition.direct[0].rectangle.query_rows, (Span{0, 1, 200}));
  EXPECT_EQ(composition.direct[0].rectangle.grad_rows, (Span{10, 1, 200}));
  EXPECT_TRUE(composition.direct[0].rectangle.lower_triangle());
}

// A zigzag rank's two chunks of queries, and the two of another rank's keys, are adjacent in storage.
TEST(Composition, JoinsRectanglesBesideEachOther) {
  CompositionInput in;
  in.rows = 300, in.heads = 4, in.group = 2, in.fill = 1;
  in.keys = {{0, 1, 1}, {0, 1, 2}, 300};
  in.grads = {{0, 1, 1}, {0, 1, 2}, 500};
  struct Place {
    int64_t query, key, grad;
    Span heads{0, 1, 4};
  };
  const auto composed = [&](const std::vector<Place>& places) {
    std::vector<Tile> tiles;
    for (const Place& p : places) {
      Tile t;
      t.batch = {0, 1, 1}, t.heads = p.heads;
      t.query_rows = {p.query * 100, 1, 100}, t.key_rows = {p.key * 100, 1, 100}, t.grad_rows = {p.grad * 100, 1, 100};
      t.query_positions = {p.query * 700, 1, 100}, t.key_positions = {p.key * 700, 1, 100};
      tiles.push_back(t);
    }
    expect_each_pair_once(tiles, in);
    return compose(tiles, in).direct;
  };
  const auto one = [](const std::vector<DirectCall>& calls, Span queries, Span keys, Span grads) {
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(calls[0].rectangle.query_rows, queries);
    EXPECT_EQ(calls[0].rectangle.key_rows, keys);
    EXPECT_EQ(calls[0].rectangle.grad_rows, grads);
  };
  one(composed({{1, 0, 2}, {0, 0, 2}}), {0, 1, 200}, {0, 1, 100}, {200, 1, 100});
  one(composed({{1, 0, 2}, {1, 1, 3}}), {100, 1, 100}, {0, 1, 200}, {200, 1, 200});
  one(composed({{1, 1, 3}, {0, 0, 2}, {0, 1, 3}, {1, 0, 2}}), {0, 1, 200}, {0, 1, 200}, {200, 1, 200});
  EXPECT_EQ(composed({{0, 0, 2}, {2, 0, 2}}).size(), 2u);  // rows lie between the queries
  EXPECT_EQ(composed({{1, 0, 2}, {1, 1, 4}}).size(), 2u);  // and between the rows of gradients
  EXPECT_EQ(composed({{1, 0, 2}, {1, 1, 1}}).size(), 2u);
  EXPECT_EQ(composed({{0, 0, 2}, {1, 1, 3}}).size(), 2u);  // a corner is not a side
  EXPECT_EQ(composed({{0, 0, 2, {0, 1, 2}}, {1, 0, 2, {2, 1, 2}}}).size(), 2u);
}

TEST(Composition, BatchesTilesOfOneShape) {
  CompositionInput in;
  in.rows = 1024, in.heads = 4, in.group = 2;
  in.keys = {{0, 1, 1}, {0, 1, 2}, 1024};
  std::vector<Tile> tiles;
  for (int64_t block = 0; block < 8; ++block) {
    for (const int64_t key_block : {block, (block + 3) % 8}) {
      Tile t;
      t.batch = {0, 1, 1}, t.heads = {0, 1, 4};
      t.query_rows = t.query_positions = {block * 128, 1, 128};
      t.key_rows = t.key_positions = {key_block * 128, 1, 128};
      tiles.push_back(t);
    }
  }
  const Composition composition = compose(tiles, in);
  ASSERT_EQ(composition.gathered.size(), 1u);
  EXPECT_EQ(composition.gathered[0].count, 8);
  EXPECT_EQ(composition.gathered[0].keys, 256);
  EXPECT_EQ(composition.gathered[0].heads, 4);
  EXPECT_TRUE(composition.direct.empty());
}

// Compositions are cached by this key, so everything that changes the result of compose must change it. The content of
// the tiles is that of their place in their program.
TEST(Composition, KeyCoversEveryInput) {
  CompositionInput in;
  in.rows = 100, in.heads = 4, in.group = 2;
  in.keys = {{0, 1, 2}, {0, 1, 2}, 100}, in.grads = {{0, 1, 2}, {0, 1, 2}, 200};
  const std::vector<Tile> tiles(3);
  std::vector<CompositionInput> others(13, in);
  others[0].rows = 101, others[1].heads = 8, others[2].group = 1, others[3].any_band = true;
  others[4].most_gathered = 7, others[5].fill = 7;
  others[6].keys.batch = {1, 1, 2}, others[7].keys.heads = {0, 1, 1}, others[8].keys.rows = 99;
  others[9].grads.batch = {0, 2, 2}, others[10].grads.heads = {1, 1, 2}, others[11].grads.rows = 0;
  std::set<std::string> seen;
  for (const CompositionInput& other : others) EXPECT_TRUE(seen.insert(composition_key(1, tiles, other)).second);
  const auto part = [&](size_t first, size_t count) { return std::span(tiles).subspan(first, count); };
  for (const auto& [first, count] : {std::pair<size_t, size_t>{0, 1}, {1, 1}, {0, 2}, {1, 2}}) {
    EXPECT_TRUE(seen.insert(composition_key(1, part(first, count), in)).second) << first << count;
  }
  EXPECT_TRUE(seen.insert(composition_key(2, tiles, in)).second);
  EXPECT_FALSE(seen.insert(composition_key(1, part(0, 3), in)).second);
}

}  // namespace
}  // namespace annulus::rectangles_test
