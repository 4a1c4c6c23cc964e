// Which tiles are computed together: those with the same query rows, whose keys then are one softmax over pieces of
// storage. What kernels for gathered keys do before they compute. No tensors here. Used by the cpu kernel, cpu_flash/
// and composition/.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Tiles of the same batch rows, query heads and query rows.
struct TileGroup {
  std::vector<Tile> tiles;
  int64_t keys = 0;  // of all of them
};

// In the order of the groups' first tiles. No group has more than `most_keys` keys: longer ones are cut, and follow one
// another. Tiles without queries or keys are left out.
std::vector<TileGroup> group_tiles(std::span<const Tile> tiles, int64_t most_keys);

// Some query row of some head of some batch row is in both.
bool share_queries(const TileGroup& a, const TileGroup& b);

// Keys, as indices into `keys`, that some of `queries` sees; one interval, since both ends grow with the position.
Span keys_seen(const Span& queries, const Span& keys, const Band& band);

}  // namespace annulus
