// Divides the tiles of a step into sets that the cpu kernel computes at once: rows of queries, and the keys that they
// read. Works without tensors. The functions are thread safe.
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

// Keys of a set, as a tile has them, and which of the set's runs of query rows see some of them within the tile's band.
// The tile's queries mean nothing. Keys that a run sees in several tiles are in the set several times.
struct SharedKeys {
  Tile tile;
  std::vector<int> runs;  // ascending, each once
};

// Tiles of the same batch rows and query heads: either one run of query rows of any length, or several runs that share
// keys.
struct TileSet {
  Span batch, heads;
  std::vector<QueryRun> queries;  // no two have a row in common
  std::vector<SharedKeys> keys;
};

// How a kernel computes a set.
struct SetLimits {
  // A kernel packs keys once for so many query rows, those of query heads with the same kv head taken together.
  int64_t block_rows = 0;
  // The same for a set of several runs, all of which it computes at once. No run is longer than block_rows.
  int64_t set_rows = 0;
  int64_t heads = 1;  // query heads of a kv head
};

// Most sets are the groups of group_tiles, in its order. In block-sparse patterns each group has few rows, for which
// its keys would be packed anew. So where groups would read a key for few rows on average, the tiles of the same batch
// rows and heads are cut into runs of query rows and of keys, at every row where a tile begins or ends, and many runs
// of queries with all their keys become a set. Then a key is read once for all of the set's runs that see it, or as
// often as a run sees it. Tiles without queries or keys are left out.
std::vector<TileSet> tile_sets(std::span<const Tile> tiles, const SetLimits& limits);

// Whether some query row of some head and batch row is in both sets.
bool share_queries(const TileSet& a, const TileSet& b);

}  // namespace annulus
