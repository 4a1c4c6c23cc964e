// Groups tiles with the same query rows, so that a kernel computes one softmax over all their keys, which lie in
// several pieces of storage. Works without tensors. Used by the cpu kernel, attention/cpu_flash and
// attention/composition. The functions are thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Tiles of the same batch rows, query heads and query rows.
struct TileGroup {
  std::vector<Tile> tiles;
  int64_t keys = 0;  // the number of keys of all tiles
};

// Groups the tiles; groups are in the order of their first tiles. No group has more than `most_keys` keys: longer ones
// are cut into several. Tiles without queries or keys are left out.
std::vector<TileGroup> group_tiles(std::span<const Tile> tiles, int64_t most_keys);

// Whether some query row of some head and batch row is in both groups.
bool share_queries(const TileGroup& a, const TileGroup& b);

// The keys, as indices into `keys`, between the first and the last that some of `queries` sees within the band.
Span keys_seen(const Span& queries, const Span& keys, const Band& band);

}  // namespace annulus
