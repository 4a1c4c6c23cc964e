// Cuts a pattern into tiles; see tiles.h.
#include "attention/plan/tiles.h"

#include <algorithm>

namespace annulus {
namespace {

// The query heads that read the kv heads of `kv`: one span if these are neighbours, else one span for each kv head.
std::vector<Span> query_heads(const Span& kv, int64_t group) {
  if (kv.stride == 1 || group == 1) return {{kv.begin * group, kv.stride, kv.count * group}};
  std::vector<Span> spans;
  for (int64_t i = 0; i < kv.count; ++i) spans.push_back(Span::range(kv.at(i) * group, (kv.at(i) + 1) * group));
  return spans;
}

// Drops queries and keys at the ends that meet nothing within the band, and removes the sides of the band that cut none
// of the rest. Returns false if nothing is left.
bool trim(Span& queries, Span& keys, Band& band) {
  if (band.empty()) return false;
  for (int round = 0; round < 2; ++round) {  // dropping keys can leave queries that meet nothing
    if (queries.empty() || keys.empty()) return false;
    queries = queries.clip(keys.begin - band.hi, keys.last() - band.lo);
    if (queries.empty()) return false;
    keys = keys.clip(queries.begin + band.lo, queries.last() + band.hi);
  }
  if (queries.empty() || keys.empty()) return false;
  if (keys.begin - queries.last() >= band.lo) band.lo = -Band::kUnbounded;
  if (keys.last() - queries.begin <= band.hi) band.hi = Band::kUnbounded;
  return true;
}

// The storage rows of `part`, a subset of `span`, whose first member is stored in row `first_row`.
Span rows_of(const Span& part, const Span& span, int64_t first_row) {
  return {first_row + span.index_of(part.begin), part.count > 1 ? part.stride / span.stride : 1, part.count};
}

// A span of a block and the row in which it begins. In storage the spans of a block ascend and their ranges do not
// overlap.
struct Stored {
  Span span;
  int64_t row;
};
std::vector<Stored> stored_of(const std::vector<Span>& positions) {
  std::vector<Stored> list;
  int64_t row = 0;
  for (const Span& s : positions) {
    if (!s.empty()) list.push_back({s, row});
    row += s.count;
  }
  return list;
}

// Calls visit(part of `wanted`, the stored span) for each stored span that contains a part of `wanted`.
template <typename Visit>
void for_each_stored(const Span& wanted, const std::vector<Stored>& stored, Visit visit) {
  if (wanted.empty()) return;
  auto it = std::ranges::partition_point(stored, [&](const Stored& s) { return s.span.last() < wanted.begin; });
  for (; it != stored.end() && it->span.begin <= wanted.last(); ++it) {
    const Span common = intersect(wanted, it->span);
    if (!common.empty()) visit(common, *it);
  }
}

}  // namespace

void append_tiles(const std::vector<QueryPart>& parts, int64_t heads_per_kv_head, const RowSet& rows, int buffer,
                  const RowSet& grad_rows, int grad_buffer, std::vector<Tile>& tiles) {
  const auto append = [&](int block, int grad_block, const Span& batch, const std::vector<Span>& head_spans,
                          const std::vector<Stored>& keys, const std::vector<Stored>& grads) {
    for (const QueryPart& part : parts) {
      const Span batch_rows = intersect(part.slice->batch, batch);
      if (batch_rows.empty()) continue;
      for (const Span& held : head_spans) {
        const Span heads = intersect(part.slice->heads, held);
        if (heads.empty()) continue;
        const auto emit = [&](const Span& queries, const Span& k, const Stored& key, Band band, const Stored* grad) {
          const Span query_rows{part.rows.at(part.queries.index_of(queries.begin)),
                                queries.count > 1 ? queries.stride / part.queries.stride * part.rows.stride : 1,
                                queries.count};
          tiles.push_back({buffer, block, grad_buffer, grad_block, batch_rows, heads, query_rows, queries,
                           rows_of(k, key.span, key.row), k, grad ? rows_of(k, grad->span, grad->row) : Span{}, band,
                           part.slice->mask});
        };
        for_each_stored(part.slice->keys, keys, [&](Span k, const Stored& key) {
          Span q = part.queries;
          Band band = part.slice->band;
          if (!trim(q, k, band)) return;
          if (grad_buffer < 0) return emit(q, k, key, band, nullptr);
          for_each_stored(k, grads, [&](Span kg, const Stored& grad) {
            Span qg = q;
            Band cut = band;
            if (trim(qg, kg, cut)) emit(qg, kg, key, cut, &grad);
          });
        });
      }
    }
  };
  for (size_t b = 0; b < rows.blocks.size(); ++b) {
    const RowBlock& block = rows.blocks[b];
    const std::vector<Stored> keys = stored_of(block.positions);
    if (grad_buffer < 0) {
      append(static_cast<int>(b), 0, block.batch, query_heads(block.heads, heads_per_kv_head), keys, {});
      continue;
    }
    for (size_t g = 0; g < grad_rows.blocks.size(); ++g) {
      const RowBlock& grad = grad_rows.blocks[g];
      const Span batch = intersect(block.batch, grad.batch), heads = intersect(block.heads, grad.heads);
      if (batch.empty() || heads.empty()) continue;
      append(static_cast<int>(b), static_cast<int>(g), batch, query_heads(heads, heads_per_kv_head), keys,
             stored_of(grad.positions));
    }
  }
}

std::vector<Tile> make_tiles(const Pattern& pattern, const Span& queries, const std::vector<Span>& keys) {
  std::vector<QueryPart> parts;
  for (const Slice& slice : pattern.slices) {
    const Span common = intersect(slice.queries, queries);
    if (common.empty()) continue;
    const int64_t stride = common.count > 1 ? common.stride / queries.stride : 1;
    parts.push_back({&slice, common, {queries.index_of(common.begin), stride, common.count}});
  }
  const AttentionShape& s = pattern.shape;
  const RowSet rows{{{Span::range(0, s.batch), Span::range(0, s.kv_heads), keys}}};
  std::vector<Tile> tiles;
  append_tiles(parts, s.heads / s.kv_heads, rows, /*buffer=*/0, {}, /*grad_buffer=*/-1, tiles);
  return tiles;
}

}  // namespace annulus
