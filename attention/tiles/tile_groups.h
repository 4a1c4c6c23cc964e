// Groups tiles with the same query rows, so that a kernel computes one softmax over all their keys, which lie apart in
// storage. Works without tensors. Used by attention/kernels/cpu and
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
  int64_t keys = 0;  // of all tiles
};

// Groups the tiles, in the order of the groups' first tiles. Groups of more than `most_keys` keys are split. Tiles
// without queries or keys are omitted.
std::vector<TileGroup> group_tiles(std::span<const Tile> tiles, int64_t most_keys);

// Returns the tile restricted to `n` of its keys, from index `first` on.
Tile cut_keys(const Tile& tile, int64_t first, int64_t n);

// Return the index of the first key >= keys.begin + distance, and one past the index of the last key <= keys.begin +
// distance. They may lie outside the span.
inline int64_t first_from(const Span& keys, int64_t distance) {
  return keys.stride == 1 ? distance : ceil_div(distance, keys.stride);
}
inline int64_t past_to(const Span& keys, int64_t distance) {
  return 1 + (keys.stride == 1 ? distance : floor_div(distance, keys.stride));
}

// Returns, as indices into `keys`, the range from the first to the last key that some query sees, that is, for which
// the band contains the pair.
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
