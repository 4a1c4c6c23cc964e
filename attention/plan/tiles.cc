// See tiles.h.
#include "attention/plan/tiles.h"

namespace annulus {
namespace {

// The query heads that read the kv heads of `kv`: one span where these are neighbours, else one for each kv head.
std::vector<Span> query_heads(const Span& kv, int64_t group) {
  if (kv.stride == 1 || group == 1) return {{kv.begin * group, kv.stride, kv.count * group}};
  std::vector<Span> spans;
  for (int64_t i = 0; i < kv.count; ++i) spans.push_back(Span::range(kv.at(i) * group, (kv.at(i) + 1) * group));
  return spans;
}

// Drops the queries and keys that can meet no partner, and forgets a band that keeps everything that is left.
bool trim(Span& queries, Span& keys, Band& band) {
  if (band.empty()) return false;
  for (int round = 0; round < 2; ++round) {  // trimming one side can free ends of the other
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

// The storage rows of `part`, a subset of `span` whose first member is stored at row `first_row`.
Span rows_of(const Span& part, const Span& span, int64_t first_row) {
  return {first_row + span.index_of(part.begin), part.count > 1 ? part.stride / span.stride : 1, part.count};
}

}  // namespace

void append_tiles(const Pattern& pattern, const std::vector<Span>& query_spans, const RowSet& rows, int buffer,
                  int grad_buffer, std::vector<Tile>& tiles) {
  const int64_t group = pattern.shape.heads / pattern.shape.kv_heads;
  const std::vector<Span> head_spans = query_heads(rows.heads, group);
  for (const Slice& slice : pattern.slices) {
    const Span batch = intersect(slice.batch, rows.batch);
    if (batch.empty()) continue;
    for (const Span& held : head_spans) {
      const Span heads = intersect(slice.heads, held);
      if (heads.empty()) continue;
      int64_t query_row = 0;
      for (const Span& owned : query_spans) {
        const Span queries = intersect(slice.queries, owned);
        int64_t key_row = 0;
        for (const Span& stored : rows.positions) {
          Span q = queries, k = intersect(slice.keys, stored);
          Band band = slice.band;
          if (trim(q, k, band)) {
            tiles.push_back({buffer, grad_buffer, batch, heads, rows_of(q, owned, query_row), q,
                             rows_of(k, stored, key_row), k, band});
          }
          key_row += stored.count;
        }
        query_row += owned.count;
      }
    }
  }
}

}  // namespace annulus
