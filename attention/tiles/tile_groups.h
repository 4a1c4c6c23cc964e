// Groups tiles with the same query rows, so that a kernel computes one softmax over all their keys, which lie in
// several pieces of storage. Works without tensors. Used by attention/kernels/cpu and
// attention/kernels/composition.cc. The functions are thread safe.
#pragma once

#include <algorithm>
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

// The tile with only `n` of its keys, from the one with index `first` on.
Tile cut_keys(const Tile& tile, int64_t first, int64_t n);

// The index of the first key that is at least `distance` behind keys.begin, and the index behind the last one that is
// at most `distance` behind it. They may lie outside of the span.
inline int64_t first_from(const Span& keys, int64_t distance) {
  return keys.stride == 1 ? distance : ceil_div(distance, keys.stride);
}
inline int64_t past_to(const Span& keys, int64_t distance) {
  return 1 + (keys.stride == 1 ? distance : floor_div(distance, keys.stride));
}

// The keys, as indices into `keys`, between the first and the last that some of `queries` sees within the band.
inline Span keys_seen(const Span& queries, const Span& keys, const Band& band) {
  int64_t first = 0, past = keys.count;
  if (!band.unbounded_below()) {
    first = std::clamp<int64_t>(first_from(keys, band.lo + queries.begin - keys.begin), 0, keys.count);
  }
  if (!band.unbounded_above()) {
    past = std::clamp<int64_t>(past_to(keys, band.hi + queries.last() - keys.begin), first, keys.count);
  }
  return Span::range(first, past);
}

}  // namespace annulus
