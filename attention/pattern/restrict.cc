// Restricts slices to past keys and to documents; see restrict.h.
#include "attention/pattern/restrict.h"

#include <algorithm>

namespace annulus {
namespace {

using Lists = std::vector<std::vector<int64_t>>;

const std::vector<int64_t>& of_row(const Lists& lists, int64_t row) {
  return lists[lists.size() == 1 ? 0 : static_cast<size_t>(row)];
}

// The positions where documents begin, followed by the end of the last one: document d is [bounds[d], bounds[d + 1]).
std::vector<int64_t> bounds_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> bounds = {0};
  for (const int64_t length : lengths) bounds.push_back(bounds.back() + length);
  return bounds;
}

int64_t document_of(const std::vector<int64_t>& bounds, int64_t index) {
  return std::upper_bound(bounds.begin(), bounds.end(), index) - bounds.begin() - 1;
}

}  // namespace

bool is_empty(const Slice& s) {
  return s.batch.empty() || s.heads.empty() || s.queries.empty() || s.keys.empty() || s.band.empty() ||
         s.keys.begin - s.queries.last() > s.band.hi || s.keys.last() - s.queries.begin < s.band.lo;
}

void restrict_to_past(const AttentionShape& shape, std::vector<Slice>& slices) {
  // Indices: key - query = (key position - query position) + query_offset.
  for (Slice& slice : slices) slice.band.hi = std::min(slice.band.hi, shape.query_offset);
}

std::vector<PackedRows> packed_rows(const PatternSpec& spec, const AttentionShape& shape) {
  if (spec.documents.empty()) return {{Span::range(0, shape.batch), {0, shape.q_len}, {0, shape.k_len}}};
  const Lists& of_queries = spec.documents;
  const Lists& of_keys = spec.key_documents.empty() ? spec.documents : spec.key_documents;
  std::vector<PackedRows> all;
  const int64_t rows = of_queries.size() == 1 && of_keys.size() == 1 ? 1 : shape.batch;
  for (int64_t row = 0, past = 0; row < rows; row = past) {
    for (past = row + 1; past < rows && of_row(of_queries, past) == of_row(of_queries, row) &&
                         of_row(of_keys, past) == of_row(of_keys, row);) {
      ++past;
    }
    all.push_back({rows == 1 ? Span::range(0, shape.batch) : Span::range(row, past), bounds_of(of_row(of_queries, row)),
                   bounds_of(of_row(of_keys, row))});
  }
  return all;
}

std::vector<Slice> within_documents(const PatternSpec& spec, const AttentionShape& shape,
                                    const std::vector<Slice>& slices) {
  std::vector<Slice> parts;
  for (const auto& [batch, queries, keys] : packed_rows(spec, shape)) {
    for (const Slice& slice : slices) {
      Slice part = slice;
      part.batch = intersect(slice.batch, batch);
      if (is_empty(part)) continue;
      const int64_t last = std::min(document_of(queries, slice.queries.last()), document_of(keys, slice.keys.last()));
      for (int64_t d = std::max(document_of(queries, slice.queries.begin), document_of(keys, slice.keys.begin));
           d <= last; ++d) {
        const size_t i = static_cast<size_t>(d);
        part.queries = slice.queries.clip(queries[i], queries[i + 1] - 1);
        part.keys = slice.keys.clip(keys[i], keys[i + 1] - 1);
        if (!is_empty(part)) parts.push_back(part);
      }
    }
  }
  return parts;
}

}  // namespace annulus
