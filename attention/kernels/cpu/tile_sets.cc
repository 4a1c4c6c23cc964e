// Divides tiles into sets; see tile_sets.h.
#include "attention/kernels/cpu/tile_sets.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "attention/tiles/tile_groups.h"

namespace annulus {
namespace {

// The rows for which a key is packed, below which tiles are cut. Then packing costs more than reading the queries again
// for each run of keys.
constexpr double kFewRows = 512;
// The least average length of a run of rows or keys between two cuts. Products over fewer are slow.
constexpr size_t kLeastRun = 32;

bool meet(const Span& a, const Span& b) {
  if (a.empty() || b.empty() || a.last() < b.begin || b.last() < a.begin) return false;
  return (a.stride == 1 && b.stride == 1) || !intersect(a, b).empty();
}

// Where runs begin and end. Rows and keys of all tiles are adjacent.
class Cuts {
 public:
  Cuts(std::span<const Tile> tiles, Span Tile::*rows) {
    for (const Tile& tile : tiles) at_.insert(at_.end(), {(tile.*rows).begin, (tile.*rows).last() + 1});
    std::ranges::sort(at_);
    at_.erase(std::unique(at_.begin(), at_.end()), at_.end());
  }

  // Whether the runs are long enough on average.
  bool long_runs() const { return static_cast<size_t>(at_.back() - at_.front()) >= kLeastRun * (at_.size() - 1); }

  // Calls visit(begin, past) for the runs of `rows`, which begin and end at cuts.
  template <typename Visit>
  void for_each_run(const Span& rows, Visit visit) const {
    for (auto cut = std::ranges::lower_bound(at_, rows.begin); *cut <= rows.last(); ++cut) visit(*cut, *(cut + 1));
  }

 private:
  std::vector<int64_t> at_;
};

// Whether a key is packed for few query rows on average when each group is computed alone.
bool few_rows(std::span<const TileGroup> groups, const Span& heads, const SetLimits& limits) {
  const int64_t together = std::min(limits.heads, heads.count);
  double pairs = 0, packed = 0;
  for (const TileGroup& group : groups) {
    const int64_t rows = group.tiles[0].query_rows.count, block = std::max<int64_t>(1, limits.block_rows / together);
    for (int64_t i = 0; i < rows; i += block) {
      const int64_t n = std::min(block, rows - i);
      for (const Tile& tile : group.tiles) {
        const Span queries = tile.query_positions.sub(i, n), one = queries.sub(n / 2, 1);
        packed += static_cast<double>(keys_seen(queries, tile.key_positions, tile.band).count);
        pairs += static_cast<double>(together * n * keys_seen(one, tile.key_positions, tile.band).count);
      }
    }
  }
  return pairs < kFewRows * packed;
}

bool adjacent(const Tile& tile) {
  const auto one = [](const Span& s) { return s.stride == 1 || s.count <= 1; };
  return one(tile.query_rows) && one(tile.query_positions) && one(tile.key_rows) && one(tile.key_positions) &&
         one(tile.grad_rows);
}

// A run of keys that a run of queries sees in a tile.
struct Cell {
  size_t set;
  int64_t key, keys;  // the first row, and how many
  Band band;
  int run;
  const Tile* tile;
  int before = 0;  // the cells before this one of the same run, keys, band and mask: tiles may overlap

  auto keys_of_set() const { return std::tuple(set, before, key, band.lo, band.hi, tile->mask); }
  auto order() const { return std::tuple_cat(keys_of_set(), std::tuple(run)); }
};

// The sets of tiles of the same batch rows and heads, cut at `rows` and `keys`.
std::vector<TileSet> cut_sets(std::span<const Tile> tiles, const Cuts& rows, const Cuts& keys,
                              const SetLimits& limits) {
  std::map<int64_t, QueryRun> runs;  // by their first rows
  for (const Tile& tile : tiles) {
    rows.for_each_run(tile.query_rows, [&](int64_t begin, int64_t past) {
      for (; begin < past; begin += limits.block_rows) {
        const int64_t count = std::min(limits.block_rows, past - begin), first = begin - tile.query_rows.begin;
        runs.try_emplace(begin, QueryRun{{begin, 1, count}, {tile.query_positions.begin + first, 1, count}});
      }
    });
  }
  const Span &batch = tiles[0].batch, &heads = tiles[0].heads;
  const int64_t most = limits.set_rows / std::min(limits.heads, heads.count);
  std::vector<TileSet> sets;
  std::map<int64_t, std::pair<size_t, int>> place;  // the set of the run with this first row, and its index there
  int64_t rows_of_set = most;
  for (const auto& [begin, run] : runs) {
    if (rows_of_set + run.rows.count > most) sets.push_back({batch, heads, {}, {}}), rows_of_set = 0;
    rows_of_set += run.rows.count;
    place[begin] = {sets.size() - 1, static_cast<int>(sets.back().queries.size())};
    sets.back().queries.push_back(run);
  }
  std::vector<Cell> cells;
  for (const Tile& tile : tiles) {
    keys.for_each_run(tile.key_rows, [&](int64_t begin, int64_t past) {
      const Span positions = tile.key_positions.sub(begin - tile.key_rows.begin, past - begin);
      for (auto at = place.find(tile.query_rows.begin); at != place.end() && at->first <= tile.query_rows.last();
           ++at) {
        const auto [set, run] = at->second;
        const Span& queries = sets[set].queries[static_cast<size_t>(run)].positions;
        if (keys_seen(queries, positions, tile.band).empty()) continue;
        cells.push_back({set, begin, past - begin, tile.band, run, &tile});
      }
    });
  }
  std::ranges::sort(cells, {}, &Cell::order);  // equal ones come together, as `before` is 0 so far
  for (size_t i = 1, first = 0; i < cells.size(); ++i) {
    if (cells[i].order() != cells[first].order()) first = i;
    cells[i].before = static_cast<int>(i - first);
  }
  std::ranges::sort(cells, {}, &Cell::order);
  for (size_t i = 0; i < cells.size(); ++i) {
    const Cell& cell = cells[i];
    std::vector<SharedKeys>& of_set = sets[cell.set].keys;
    if (i == 0 || cell.keys_of_set() != cells[i - 1].keys_of_set()) {
      of_set.push_back({cut_keys(*cell.tile, cell.key - cell.tile->key_rows.begin, cell.keys), {}});
    }
    of_set.back().runs.push_back(cell.run);
  }
  return sets;
}

}  // namespace

std::vector<TileSet> tile_sets(std::span<const Tile> tiles, const SetLimits& limits) {
  std::map<std::array<int64_t, 6>, std::vector<Tile>> classes;  // by batch rows and heads
  for (const Tile& tile : tiles) {
    if (tile.query_rows.empty() || tile.key_rows.empty() || tile.batch.empty() || tile.heads.empty()) continue;
    const Span &b = tile.batch, &h = tile.heads;
    classes[{b.begin, b.stride, b.count, h.begin, h.stride, h.count}].push_back(tile);
  }
  std::vector<TileSet> sets;
  for (const auto& [of, alike] : classes) {
    const std::vector<TileGroup> groups = group_tiles(alike, std::numeric_limits<int64_t>::max());
    if (groups.size() > 1 && std::ranges::all_of(alike, adjacent) && few_rows(groups, alike[0].heads, limits)) {
      const Cuts rows(alike, &Tile::query_rows), keys(alike, &Tile::key_rows);
      if (rows.long_runs() && keys.long_runs()) {
        for (TileSet& set : cut_sets(alike, rows, keys, limits)) sets.push_back(std::move(set));
        continue;
      }
    }
    for (const TileGroup& group : groups) {
      const Tile& first = group.tiles[0];
      sets.push_back({first.batch, first.heads, {{first.query_rows, first.query_positions}}, {}});
      for (const Tile& tile : group.tiles) sets.back().keys.push_back({tile, {0}});
    }
  }
  return sets;
}

bool share_queries(const TileSet& a, const TileSet& b) {
  if (!meet(a.heads, b.heads) || !meet(a.batch, b.batch)) return false;
  for (const QueryRun& x : a.queries) {
    for (const QueryRun& y : b.queries) {
      if (meet(x.rows, y.rows)) return true;
    }
  }
  return false;
}

}  // namespace annulus
