// Divides the tiles of a step into sets of query rows and their keys that the cpu kernel computes together. Works
// without tensors. The functions are thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/plan/plan.h"

namespace annulus {

// Query rows, and their positions.
struct QueryRun {
  Span rows, positions;
};

// Keys of a set, with the key fields of a tile (its query fields are unused), and the set's runs of query rows that see
// some of them within the tile's band. A key that a run sees in several tiles is in the set several times.
struct SharedKeys {
  Tile tile;
  std::vector<int> runs;  // ascending, each once
};

// Tiles of the same batch rows and query heads, with one run of query rows of any length or several runs that share
// keys.
struct TileSet {
  Span batch, heads;
  std::vector<QueryRun> queries;  // disjoint
  std::vector<SharedKeys> keys;
};

// The block sizes of a kernel. Rows of query heads with the same kv head count together.
struct SetLimits {
  // The query rows for which a kernel packs keys once.
  int64_t block_rows = 0;
  // Likewise for a set of several runs, which it computes together. No run is longer than block_rows.
  int64_t set_rows = 0;
  int64_t heads = 1;  // query heads per kv head
};

// Divides tiles into sets. Most sets are the groups of group_tiles, in its order. In block-sparse patterns, where
// packing a key would serve only few rows of a group, the tiles of the same batch rows and heads are instead cut into
// runs of query rows and of keys, at every row where a tile begins or ends, and many runs of queries with all their
// keys become a set. Then a key is packed once for all of the set's runs that see it, or as often as a run sees it.
// Tiles without queries or keys are omitted.
std::vector<TileSet> tile_sets(std::span<const Tile> tiles, const SetLimits& limits);

// Returns whether some query row of some head and batch row is in both sets.
bool share_queries(const TileSet& a, const TileSet& b);

}  // namespace annulus
