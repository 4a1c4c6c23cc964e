// Tests of tiles whose keys the cpu kernel packs once for many runs of query rows, as in block-sparse patterns: how
// they are divided into sets, what the kernel computes from them, and when it polls meanwhile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include "attention/kernels/cpu/tile_sets.h"
#include "tests/attention/kernels/kernel_case.h"

namespace annulus::shared_keys_test {
namespace {

using testing::by_definition;
using testing::Case;
using testing::right;
using testing::run;

std::mt19937_64 numbers(20251126);

int64_t draw(int64_t below) { return static_cast<int64_t>(numbers() % static_cast<uint64_t>(below)); }

// Where query and key blocks begin.
std::vector<int64_t> random_cuts(int64_t count, int64_t least, int64_t most) {
  std::vector<int64_t> cuts{0};
  while (static_cast<int64_t>(cuts.size()) <= count) cuts.push_back(cuts.back() + least + draw(most - least + 1));
  return cuts;
}

// Tiles of a random block map: rows of blocks as in plans, of which some cover two blocks of queries or keys. Where a
// query block meets the key block of the same number, later keys are hidden. Positions begin at 1000 + the row, except
// that those of the second half of the rows lie elsewhere, as in zigzag layouts.
std::vector<Tile> block_sparse(const std::vector<int64_t>& rows, const std::vector<int64_t>& keys, Span heads,
                               double density) {
  std::vector<Tile> tiles;
  const auto position = [](int64_t row, int64_t half) { return 1000 + row + (row >= half ? 7777 : 0); };
  const auto add = [&](size_t i, size_t past_i, size_t j, size_t past_j, Band band) {
    Tile t;
    t.batch = {0, 1, 1}, t.heads = heads;
    t.query_rows = Span::range(rows[i], rows[past_i]), t.key_rows = Span::range(keys[j], keys[past_j]);
    t.query_positions = {position(rows[i], rows[rows.size() / 2]), 1, t.query_rows.count};
    t.key_positions = {position(keys[j], keys[keys.size() / 2]), 1, t.key_rows.count};
    t.grad_rows = t.key_rows, t.grad_rows.begin += 3;
    t.band = band;
    tiles.push_back(t);
  };
  const size_t n = rows.size() - 1, m = keys.size() - 1;
  std::set<std::pair<size_t, size_t>> taken;
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < m; ++j) {
      const bool diagonal = i == j;
      if (taken.contains({i, j}) || (!diagonal && static_cast<double>(draw(1000)) >= 1000 * density)) continue;
      const auto fits = [&](size_t a, size_t b) { return a < n && b < m && a != b && !taken.contains({a, b}); };
      // Positions of both halves must not be mixed in a tile.
      const bool tall = !diagonal && draw(3) == 0 && fits(i + 1, j) && i + 1 != rows.size() / 2;
      const bool wide = !diagonal && !tall && draw(3) == 0 && fits(i, j + 1) && j + 1 != keys.size() / 2;
      if (tall) taken.insert({i + 1, j});
      if (wide) taken.insert({i, j + 1});
      add(i, i + (tall ? 2 : 1), j, j + (wide ? 2 : 1), diagonal ? Band{-Band::kUnbounded, 0} : Band{});
    }
  }
  return tiles;
}

using Pair = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // head, query row, key row, row of the gradient

void count_pairs(const Span& heads, const QueryRun& queries, const Tile& tile, std::map<Pair, int>& pairs) {
  for (int64_t h = 0; h < heads.count; ++h) {
    for (int64_t i = 0; i < queries.rows.count; ++i) {
      for (int64_t j = 0; j < tile.key_rows.count; ++j) {
        if (!tile.band.contains(queries.positions.at(i), tile.key_positions.at(j))) continue;
        ++pairs[{heads.at(h), queries.rows.at(i), tile.key_rows.at(j), tile.grad_rows.at(j)}];
      }
    }
  }
}

std::map<Pair, int> pairs_of(const std::vector<Tile>& tiles) {
  std::map<Pair, int> pairs;
  for (const Tile& t : tiles) count_pairs(t.heads, {t.query_rows, t.query_positions}, t, pairs);
  return pairs;
}

std::map<Pair, int> pairs_of(const std::vector<TileSet>& sets) {
  std::map<Pair, int> pairs;
  for (const TileSet& set : sets) {
    for (const SharedKeys& keys : set.keys) {
      for (const int run : keys.runs) {
        count_pairs(set.heads, set.queries[static_cast<size_t>(run)], keys.tile, pairs);
      }
    }
  }
  return pairs;
}

TEST(TileSets, HaveThePairsOfTheirTilesAndReadKeysOnce) {
  const SetLimits limits{.block_rows = 48, .set_rows = 300, .heads = 2};
  for (int round = 0; round < 8; ++round) {
    const std::vector<int64_t> rows = random_cuts(12, 32, 64), keys = random_cuts(14, 32, 50);
    std::vector<Tile> tiles = block_sparse(rows, keys, {0, 1, 2}, 0.3);
    const std::vector<Tile> others = block_sparse(rows, keys, {2, 1, 1}, 0.2);
    tiles.insert(tiles.end(), others.begin(), others.end());
    std::ranges::shuffle(tiles, numbers);
    Tile empty = tiles[0];
    empty.key_rows.count = empty.key_positions.count = empty.grad_rows.count = 0;
    tiles.push_back(empty);
    const std::vector<TileSet> sets = tile_sets(tiles, limits);
    EXPECT_EQ(pairs_of(sets), pairs_of(tiles));
    EXPECT_LT(sets.size(), 12u);  // 400 to 770 rows of two heads, and of one
    for (const TileSet& set : sets) {
      int64_t all = 0;
      std::set<int64_t> seen;
      for (const QueryRun& run : set.queries) {
        all += run.rows.count;
        EXPECT_LE(run.rows.count, limits.block_rows);
        for (int64_t i = 0; i < run.rows.count; ++i) EXPECT_TRUE(seen.insert(run.rows.at(i)).second);
      }
      EXPECT_LE(all, limits.set_rows / set.heads.count);
      std::set<std::tuple<int64_t, int64_t>> read;  // key rows, with and without a band
      for (const SharedKeys& k : set.keys) {
        EXPECT_TRUE(std::ranges::is_sorted(k.runs));
        for (int64_t j = 0; j < k.tile.key_rows.count; ++j) {
          EXPECT_TRUE(read.insert({k.tile.key_rows.at(j), k.tile.band.hi}).second);
        }
      }
    }
  }
}

// Repeats every third tile, and the first one twice.
void repeat_some(std::vector<Tile>& tiles) {
  for (size_t i = 0, n = tiles.size(); i < n; i += 3) tiles.push_back(tiles[i]);
  tiles.push_back(tiles[0]);
}

// A kernel writes a run's results after its last keys, so no run may come twice for the same keys.
TEST(TileSets, RunsComeOnceForKeysOfSeveralTiles) {
  const std::vector<int64_t> rows = random_cuts(12, 32, 64), keys = random_cuts(14, 32, 50);
  std::vector<Tile> tiles = block_sparse(rows, keys, {0, 1, 2}, 0.3);
  repeat_some(tiles);
  const std::vector<TileSet> sets = tile_sets(tiles, {.block_rows = 48, .set_rows = 300, .heads = 2});
  EXPECT_EQ(pairs_of(sets), pairs_of(tiles));
  for (const TileSet& set : sets) {
    for (const SharedKeys& k : set.keys) {
      EXPECT_EQ(std::ranges::adjacent_find(k.runs, std::ranges::greater_equal()), k.runs.end());
    }
  }
}

// Tiles that gain nothing, because their rows are many, strided or in short pieces, stay as they are.
TEST(TileSets, OtherTilesAreGrouped) {
  const auto tile = [](Span rows, Span keys) {
    Tile t;
    t.batch = t.heads = {0, 1, 1};
    t.query_rows = t.query_positions = rows;
    t.key_rows = t.key_positions = t.grad_rows = keys;
    return t;
  };
  const SetLimits limits{.block_rows = 1024, .set_rows = 4096, .heads = 1};
  const auto check = [&](const std::vector<Tile>& tiles) {
    const std::vector<TileSet> sets = tile_sets(tiles, limits);
    EXPECT_EQ(pairs_of(sets), pairs_of(tiles));
    return std::ranges::all_of(sets, [](const TileSet& set) { return set.queries.size() == 1; });
  };
  const Tile first = tile({0, 1, 64}, {0, 1, 64}), second = tile({64, 1, 64}, {0, 1, 64});
  EXPECT_FALSE(check({first, second}));
  EXPECT_TRUE(check({first, tile({1, 2, 64}, {0, 1, 64})}));
  EXPECT_TRUE(check({first, tile({64, 1, 64}, {0, 2, 64})}));
  EXPECT_TRUE(check({tile({0, 1, 600}, {0, 1, 64}), tile({600, 1, 600}, {0, 1, 64})}));
  std::vector<Tile> short_ones;
  for (int64_t i = 0; i < 20; ++i) short_ones.push_back(tile({20 * i, 1, 20}, {0, 1, 64}));
  EXPECT_TRUE(check(short_ones));
}

TEST(TileSets, ShareQueriesIfARowOfAHeadIsInBoth) {
  const auto set = [](std::vector<Span> rows, Span heads, Span batch) {
    TileSet s{batch, heads, {}, {}};
    for (const Span& r : rows) s.queries.push_back({r, r});
    return s;
  };
  const TileSet one = set({{0, 2, 10}, {50, 1, 10}}, {0, 1, 2}, {0, 1, 2});
  for (const auto& [other, expected] : {std::pair{set({{18, 1, 3}}, {1, 1, 1}, {1, 1, 1}), true},
                                        {set({{1, 2, 10}}, {0, 1, 2}, {0, 1, 2}), false},
                                        {set({{0, 2, 10}}, {2, 1, 2}, {0, 1, 2}), false},
                                        {set({{0, 2, 10}}, {0, 1, 2}, {2, 1, 1}), false},
                                        {set({{19, 1, 3}}, {0, 1, 2}, {0, 1, 2}), false},
                                        {set({{30, 1, 3}, {59, 1, 3}}, {0, 1, 2}, {0, 1, 2}), true}}) {
    EXPECT_EQ(share_queries(one, other), expected);
    EXPECT_EQ(share_queries(other, one), expected);
  }
}

Case block_sparse_case(at::ScalarType type, int64_t dim, int64_t group) {
  const std::vector<int64_t> rows = random_cuts(31, 48, 110), keys = random_cuts(36, 33, 60);
  const auto options = at::TensorOptions().dtype(type);
  Case c;
  c.q = at::randn({1, rows.back(), 2, dim}, options), c.dout = at::randn({1, rows.back(), 2, dim}, options);
  const int64_t kv = 2 / group;
  c.keys = {at::randn({1, keys.back(), kv, dim}, options),
            at::randn({1, keys.back(), kv, dim}, options),
            {0, 1, 1},
            {0, 1, kv}};
  c.grad_batch = {0, 1, 1}, c.grad_heads = {0, 1, kv}, c.grad_rows = keys.back() + 3;
  c.call.group = group, c.call.scale = 0.3;
  c.tiles = block_sparse(rows, keys, {0, 1, 2}, 0.1);
  return c;
}

class SharedKeysKernel : public ::testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

// If two heads share their keys, the rows are several sets. Rows of 16 elements are whole vectors with every
// instruction set, those of 20 are not.
TEST_F(SharedKeysKernel, EqualsTheDefinition) {
  for (const auto& [group, dim] : {std::pair<int64_t, int64_t>{1, 20}, {2, 16}}) {
    for (const at::ScalarType type : kTypes) {
      const Case c = block_sparse_case(type, dim, group);
      ASSERT_GT(tile_sets(c.tiles, {1024, 4096, group})[0].queries.size(), 1u);
      const testing::Expected want = by_definition(c);
      for (const int threads : {1, 3}) {
        at::set_num_threads(threads);
        EXPECT_TRUE(right(run(c, KernelKind::kCpu), c, want))
            << type << " " << dim << " " << group << ", " << threads << " threads";
      }
    }
  }
}

// In a union of patterns a query may see a key several times.
TEST_F(SharedKeysKernel, PairsOfSeveralTilesCountAsOften) {
  for (const at::ScalarType type : kTypes) {
    Case c = block_sparse_case(type, 20, type == at::kDouble ? 1 : 2);
    repeat_some(c.tiles);
    const testing::Expected want = by_definition(c);
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(right(run(c, KernelKind::kCpu), c, want)) << type << ", " << threads << " threads";
    }
  }
}

TEST_F(SharedKeysKernel, DropsTheSamePairs) {
  Case c = block_sparse_case(at::kDouble, 16, 2);
  for (Tile& t : c.tiles) t.query_positions = t.query_rows, t.key_positions = t.key_rows, t.band = {};
  c.call.dropout = {0.3, 7, 3, 1, 5};
  EXPECT_TRUE(right(run(c, KernelKind::kCpu), c));
}

TEST_F(SharedKeysKernel, ResultsOfASingleCallAreRoundedAtOnce) {
  Case c = block_sparse_case(at::kBFloat16, 16, 2);
  const testing::Result later = run(c, KernelKind::kCpu);
  c.call.at_once = true;
  const testing::Result at_once = run(c, KernelKind::kCpu);
  EXPECT_EQ(at_once.out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(at_once.dq.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at_once.out.equal(later.out.to(at::kBFloat16)));
  EXPECT_TRUE(at_once.dq.equal(later.dq.to(at::kBFloat16)));
}

TEST_F(SharedKeysKernel, ResultsAreTheSameFromRunToRun) {
  const Case c = block_sparse_case(at::kFloat, 16, 1);
  const testing::Result first = run(c, KernelKind::kCpu), second = run(c, KernelKind::kCpu);
  EXPECT_TRUE(first.out.equal(second.out) && first.lse.equal(second.lse) && first.dq.equal(second.dq));
  EXPECT_TRUE(first.dk.equal(second.dk) && first.dv.equal(second.dv));
}

// The calling thread polls while a single call of the kernel is under way, no other thread does, and what it throws
// arrives.
TEST_F(SharedKeysKernel, PollsInTheCallingThreadOnly) {
  const int64_t rows = 4096;
  Case c;
  c.q = at::randn({1, rows, 2, 64}), c.dout = at::randn({1, rows, 2, 64});
  c.keys = {at::randn({1, rows, 2, 64}), at::randn({1, rows, 2, 64}), {0, 1, 1}, {0, 1, 2}};
  c.tiles = block_sparse(random_cuts(31, 128, 128), random_cuts(31, 128, 128), {0, 1, 2}, 0.5);
  c.call.scale = 0.125;
  const std::thread::id caller = std::this_thread::get_id();
  for (const int threads : {1, 3}) {
    at::set_num_threads(threads);
    int polls = 0;
    const Kernel::Poll poll = [&] {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      ++polls;
    };
    const auto kernel = make_kernel(KernelKind::kCpu, c.q);
    kernel->begin_forward(c.q, c.call);
    kernel->forward(c.keys, c.tiles, poll);
    EXPECT_GE(polls, threads == 1 ? 6 : 1);  // 17 million pairs of 256 operations, a poll every 3e8
    const Kernel::Poll dies = [] { throw std::runtime_error("a peer has died"); };
    EXPECT_THROW(kernel->forward(c.keys, c.tiles, dies), std::runtime_error) << threads;
  }
}

}  // namespace
}  // namespace annulus::shared_keys_test
