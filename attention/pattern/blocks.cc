// See slices.h. docs/explanation/attention.md, "Block-sparse attention", defines the maps.
#include "attention/pattern/slices.h"

#include <algorithm>

#include "common/splitmix64.h"

namespace annulus {
namespace {

// Draws `wanted` of the numbers 0, ..., eligible - 1 without replacement and returns them in ascending order. Draw t
// takes the number at index x of those not drawn yet, with x = splitmix64(key + t) mod (eligible - t).
std::vector<int64_t> draw(uint64_t key, int64_t wanted, int64_t eligible) {
  std::vector<int64_t> drawn;  // ascending
  for (int64_t t = 0; t < std::min(wanted, eligible); ++t) {
    int64_t x = static_cast<int64_t>(splitmix64(key + static_cast<uint64_t>(t)) % static_cast<uint64_t>(eligible - t));
    auto it = drawn.begin();
    for (; it != drawn.end() && *it <= x; ++it) ++x;
    drawn.insert(it, x);
  }
  return drawn;
}

// The active key blocks of one query block.
class Row {
 public:
  // The visible key blocks are [0, end).
  Row(int64_t end, std::vector<BlockRun>& runs) : end_(end), first_(runs.size()), runs_(runs) {}

  // Adds the visible blocks of [begin, end).
  void add(int64_t begin, int64_t end) {
    begin = std::max<int64_t>(begin, 0), end = std::min(end, end_);
    if (begin < end) runs_.push_back({begin, end});
  }
  // Adds the visible blocks of [begin, end) that are congruent to `residue` modulo `stride`; 0 <= residue < stride.
  void add_every(int64_t begin, int64_t end, int64_t stride, int64_t residue) {
    if (stride == 1) return add(begin, end);
    begin = std::max<int64_t>(begin, 0), end = std::min(end, end_);
    for (int64_t j = begin + (((residue - begin) % stride) + stride) % stride; j < end; j += stride) add(j, j + 1);
  }
  // Sorts the added runs and joins those that overlap or touch.
  void finish() {
    const auto begin = runs_.begin() + static_cast<ptrdiff_t>(first_);
    std::sort(begin, runs_.end(), [](const BlockRun& a, const BlockRun& b) { return a.begin < b.begin; });
    size_t kept = first_;
    for (size_t i = first_; i < runs_.size(); ++i) {
      if (kept > first_ && runs_[i].begin <= runs_[kept - 1].end) {
        runs_[kept - 1].end = std::max(runs_[kept - 1].end, runs_[i].end);
      } else {
        runs_[kept++] = runs_[i];
      }
    }
    runs_.resize(kept);
  }

 private:
  int64_t end_;
  size_t first_;
  std::vector<BlockRun>& runs_;
};

// Appends the runs of one query block. `query` is the number of the query block by position, and `head` is the query
// head. The visible key blocks are [0, end).
void fill_row(const BlocksSpec& spec, bool causal, int64_t head, int64_t query, int64_t end,
              std::vector<BlockRun>& runs) {
  using Map = BlocksSpec::Map;
  Row row(end, runs);
  const int64_t window = spec.window_blocks;
  const auto add_globals = [&] {
    row.add(0, spec.global_blocks);
    if (!causal && query >= 0 && query < spec.global_blocks) row.add(0, end);
  };
  if (spec.map != Map::kDilated && spec.map != Map::kHierarchical) row.add(query - window, query + window + 1);
  switch (spec.map) {
    case Map::kDilated:
      row.add_every(query - window, query + window + 1, spec.rate, ((query % spec.rate) + spec.rate) % spec.rate);
      break;
    case Map::kGlobalLocal:
      add_globals();
      break;
    case Map::kBigBird: {
      add_globals();
      if (!causal && query >= 0 && query < spec.global_blocks) break;
      // Two ranges of blocks may be drawn: those before and those after the window, without the global ones.
      const int64_t begin = std::min(spec.global_blocks, end);
      const int64_t before = std::max<int64_t>(0, std::min(query - window, end) - begin);
      const int64_t after = std::max(begin, query + window + 1);
      const uint64_t key =
          splitmix64(splitmix64(splitmix64(static_cast<uint64_t>(spec.seed)) ^ static_cast<uint64_t>(head)) ^
                     static_cast<uint64_t>(query));
      for (const int64_t x : draw(key, spec.random_blocks, before + std::max<int64_t>(0, end - after))) {
        const int64_t block = x < before ? begin + x : after + (x - before);
        row.add(block, block + 1);
      }
      break;
    }
    case Map::kStrided:
      row.add_every(0, end, spec.stride, spec.stride - 1);
      break;
    case Map::kHierarchical:
      for (const BlocksSpec::Level& level : spec.levels) {
        row.add_every(query - level.reach, query + level.reach + 1, level.stride, level.stride - 1);
      }
      break;
    default:  // local: the window alone
      break;
  }
  row.finish();
}

// Appends the slices of the query blocks that begin at row `first_row` of the map, for these batch rows and heads.
void append_rows(const BlockMap& map, const AttentionShape& shape, int64_t first_row, const Span& batch,
                 const Span& heads, std::vector<Slice>& slices) {
  struct Open {
    BlockRun run;
    int64_t since = 0;  // the first query block that has the run
  };
  std::vector<Open> open, next;  // ascending
  const auto close = [&](const Open& o, int64_t past) {
    slices.push_back({batch,
                      heads,
                      Span::range(o.since * map.block, std::min(past * map.block, shape.q_len)),
                      Span::range(o.run.begin * map.block, std::min(o.run.end * map.block, shape.k_len)),
                      {}});
  };
  for (int64_t i = 0; i < map.query_blocks; ++i) {
    const size_t x = static_cast<size_t>(first_row + i);
    next.clear();
    auto old = open.begin();
    for (int64_t r = map.offsets[x]; r < map.offsets[x + 1]; ++r) {
      const BlockRun& run = map.runs[static_cast<size_t>(r)];
      while (old != open.end() && old->run.begin < run.begin) close(*old++, i);
      if (old != open.end() && old->run == run) {
        next.push_back(*old++);
      } else {
        next.push_back({run, i});
      }
    }
    while (old != open.end()) close(*old++, i);
    std::swap(open, next);
  }
  for (const Open& o : open) close(o, map.query_blocks);
}

// Whether the rows [a, a + n) of the map have the same runs as the rows [b, b + n).
bool same_rows(const BlockMap& map, int64_t a, int64_t b, int64_t n) {
  const auto at = [&](int64_t row) { return map.offsets[static_cast<size_t>(row)]; };
  if (at(a + n) - at(a) != at(b + n) - at(b)) return false;
  for (int64_t i = 0; i < n; ++i) {
    if (at(a + i + 1) - at(a) != at(b + i + 1) - at(b)) return false;
  }
  return std::equal(map.runs.begin() + at(a), map.runs.begin() + at(a + n), map.runs.begin() + at(b));
}

}  // namespace

BlockMap named_block_map(const BlocksSpec& spec, bool causal, const AttentionShape& shape) {
  BlockMap map;
  map.block = spec.block;
  map.query_blocks = ceil_div(shape.q_len, spec.block);
  map.key_blocks = ceil_div(shape.k_len, spec.block);
  const bool drawn = spec.map == BlocksSpec::Map::kBigBird && spec.random_blocks > 0;
  map.heads = drawn && spec.per_head ? shape.heads : 1;
  map.offsets.reserve(static_cast<size_t>(map.heads * map.query_blocks) + 1);
  map.offsets.push_back(0);
  const int64_t first = shape.query_offset / spec.block;  // validate has checked that it is a multiple
  for (int64_t head = 0; head < map.heads; ++head) {
    for (int64_t i = first; i < first + map.query_blocks; ++i) {
      fill_row(spec, causal, head, i, causal ? std::min(map.key_blocks, i + 1) : map.key_blocks, map.runs);
      map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
    }
  }
  return map;
}

BlockMap without_future(const BlockMap& map, const AttentionShape& shape) {
  BlockMap past{map.block, map.batch, map.heads, map.query_blocks, map.key_blocks, {0}, {}};
  for (int64_t row = 0; row < map.batch * map.heads * map.query_blocks; ++row) {
    const int64_t block = row % map.query_blocks;
    const int64_t last = std::min((block + 1) * map.block, shape.q_len) - 1 + shape.query_offset;
    const int64_t end = floor_div(last, map.block) + 1;
    for (int64_t r = map.offsets[static_cast<size_t>(row)]; r < map.offsets[static_cast<size_t>(row) + 1]; ++r) {
      const BlockRun& run = map.runs[static_cast<size_t>(r)];
      if (run.begin < end) past.runs.push_back({run.begin, std::min(run.end, end)});
    }
    past.offsets.push_back(static_cast<int64_t>(past.runs.size()));
  }
  return past;
}

void append_blocks(const BlockMap& map, const AttentionShape& shape, std::vector<Slice>& slices) {
  const int64_t per_row = map.heads * map.query_blocks;
  for (int64_t b = 0, past_b = 0; b < map.batch; b = past_b) {
    for (past_b = b + 1; past_b < map.batch && same_rows(map, b * per_row, past_b * per_row, per_row);) ++past_b;
    const Span batch = map.batch == 1 ? Span::range(0, shape.batch) : Span::range(b, past_b);
    for (int64_t h = 0, past_h = 0; h < map.heads; h = past_h) {
      const int64_t first = b * per_row + h * map.query_blocks;
      const auto same = [&](int64_t head) {
        return same_rows(map, first, b * per_row + head * map.query_blocks, map.query_blocks);
      };
      for (past_h = h + 1; past_h < map.heads && same(past_h);) ++past_h;
      append_rows(map, shape, first, batch, map.heads == 1 ? Span::range(0, shape.heads) : Span::range(h, past_h),
                  slices);
    }
  }
}

void append_plane_blocks(const BlockMap& map, int64_t plane, const AttentionShape& shape, const Span& batch,
                         const Span& heads, std::vector<Slice>& slices) {
  append_rows(map, shape, plane * map.query_blocks, batch, heads, slices);
}

}  // namespace annulus
