// Divides the work of the cpu kernel; see cpu_items.h.
#include "attention/kernels/cpu/cpu_items.h"

#include <algorithm>

#include "attention/kernels/cpu/flash.h"
#include "attention/tiles/tile_groups.h"

namespace annulus {
namespace {

constexpr int64_t kFewestBlocks = 16;  // the fewest items that threads should share

int64_t rows_at_once(int64_t rows, int64_t heads) {
  constexpr int64_t kFewestRows = 256;
  int64_t most = kMostRows;
  if (at::get_num_threads() > 1) {
    while (most > kFewestRows && heads * ceil_div(rows, most) < kFewestBlocks) most /= 2;
  }
  return ceil_div(rows, ceil_div(rows, most));  // blocks of about equal size
}

// Divides heads into sets of at most `most` that read the same kv head. Its keys are packed once for each set.
std::vector<Span> heads_together(const Span& heads, int64_t group, int64_t most) {
  std::vector<Span> sets;
  for (int64_t h = 0; h < heads.count; ++h) {
    const bool joins = !sets.empty() && sets.back().count < most && sets.back().begin / group == heads.at(h) / group;
    if (joins) {
      ++sets.back().count;
    } else {
      sets.push_back(heads.sub(h, 1));
    }
  }
  return sets;
}

}  // namespace

int64_t Item::count() const {
  int64_t all = 0;
  for (const Span& span : rows) all += span.count;
  return all;
}

int64_t Item::pairs() const {
  int64_t pairs = 0;
  for (const SharedKeys& keys : set->keys) {
    for (const int run : keys.runs) {
      const Span positions = positions_of(static_cast<size_t>(run));
      pairs += positions.count * keys_seen(positions, keys.tile.key_positions, keys.tile.band).count;
    }
  }
  return pairs * heads.count;
}

std::vector<Item> items_of(const TileSet& set, int64_t group, bool heads_apart) {
  std::vector<std::vector<Span>> blocks;
  int64_t together = group;  // the most heads of an item
  if (set.queries.size() == 1) {
    const int64_t count = set.queries[0].rows.count, all_heads = set.batch.count * set.heads.count;
    const int64_t rows = rows_at_once(count, all_heads);
    for (int64_t i = 0; i < count; i += rows) blocks.push_back({Span::range(i, std::min(count, i + rows))});
    together = std::max<int64_t>(1, kMostRows / rows);
    if (at::get_num_threads() > 1) {
      together = std::clamp<int64_t>(all_heads * std::ssize(blocks) / kFewestBlocks, 1, together);
    }
  } else {
    blocks.emplace_back();
    for (const QueryRun& run : set.queries) blocks[0].push_back(Span::range(0, run.rows.count));
  }
  std::vector<Item> items;
  const std::vector<Span> head_sets = heads_together(set.heads, group, together);
  for (int64_t b = 0; b < set.batch.count; ++b) {
    if (heads_apart) {
      for (const std::vector<Span>& rows : blocks) {
        for (const Span& heads : head_sets) items.push_back({&set, set.batch.at(b), heads, rows});
      }
    } else {
      for (const Span& heads : head_sets) {
        for (const std::vector<Span>& rows : blocks) items.push_back({&set, set.batch.at(b), heads, rows});
      }
    }
  }
  return items;
}

SetLimits set_limits(int64_t rows, int64_t group) {
  const bool alone = at::get_num_threads() == 1;
  return {kMostRows, alone ? kMostSetRows : std::clamp(rows / kFewestBlocks, kMostRows, kMostSetRows), group};
}

int64_t threads_for(double flops) {
  constexpr double kWorthAThread = 2e6;
  return static_cast<int64_t>(std::clamp(flops / kWorthAThread, 1.0, static_cast<double>(at::get_num_threads())));
}

}  // namespace annulus
