// Groups tiles by their queries; see tile_groups.h.
#include "attention/tiles/tile_groups.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>

namespace annulus {
namespace {

bool meet(const Span& a, const Span& b) {
  if (a.empty() || b.empty() || a.last() < b.begin || b.last() < a.begin) return false;
  return (a.stride == 1 && b.stride == 1) || !intersect(a, b).empty();
}

}  // namespace

std::vector<TileGroup> group_tiles(std::span<const Tile> tiles, int64_t most_keys) {
  std::vector<TileGroup> groups;
  std::map<std::array<int64_t, 9>, size_t> latest;  // the last group for each set of queries
  for (const Tile& tile : tiles) {
    if (tile.query_rows.empty() || tile.batch.empty() || tile.heads.empty()) continue;
    const Span &r = tile.query_rows, &h = tile.heads, &b = tile.batch;
    const std::array<int64_t, 9> key{r.begin, r.stride, r.count,  h.begin, h.stride,
                                     h.count, b.begin,  b.stride, b.count};
    for (int64_t first = 0; first < tile.key_rows.count;) {
      auto found = latest.find(key);
      if (found == latest.end() || groups[found->second].keys >= most_keys) {
        found = latest.insert_or_assign(key, groups.size()).first;
        groups.emplace_back();
      }
      TileGroup& group = groups[found->second];
      const int64_t n = std::min(tile.key_rows.count - first, most_keys - group.keys);
      group.tiles.push_back(tile);
      Tile& part = group.tiles.back();
      part.key_rows = tile.key_rows.sub(first, n);
      part.key_positions = tile.key_positions.sub(first, n);
      if (!tile.grad_rows.empty()) part.grad_rows = tile.grad_rows.sub(first, n);
      group.keys += n;
      first += n;
    }
  }
  return groups;
}

bool share_queries(const TileGroup& a, const TileGroup& b) {
  const Tile &x = a.tiles[0], &y = b.tiles[0];
  return meet(x.query_rows, y.query_rows) && meet(x.heads, y.heads) && meet(x.batch, y.batch);
}

}  // namespace annulus
