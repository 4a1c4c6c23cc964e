// Groups tiles by their queries; see tile_groups.h.
#include "attention/tiles/tile_groups.h"

#include <algorithm>
#include <array>
#include <map>

namespace annulus {

Tile cut_keys(const Tile& tile, int64_t first, int64_t n) {
  Tile part = tile;
  part.key_rows = tile.key_rows.sub(first, n);
  part.key_positions = tile.key_positions.sub(first, n);
  if (!tile.grad_rows.empty()) part.grad_rows = tile.grad_rows.sub(first, n);
  return part;
}

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
      group.tiles.push_back(cut_keys(tile, first, n));
      group.keys += n;
      first += n;
    }
  }
  return groups;
}

}  // namespace annulus
