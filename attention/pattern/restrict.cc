// Restricts slices to past keys, documents, kept keys and masks; see slices.h.
#include "attention/pattern/slices.h"

#include <algorithm>

namespace annulus {
namespace {

using Lists = std::vector<std::vector<int64_t>>;

template <typename T>
const std::vector<T>& of_row(const std::vector<std::vector<T>>& lists, int64_t row) {
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

std::vector<Slice> within_kept_keys(const PatternSpec& spec, const AttentionShape& shape,
                                    const std::vector<Slice>& slices) {
  std::vector<Slice> parts;
  const int64_t rows = spec.kept_keys.size() == 1 ? 1 : shape.batch;
  for (int64_t row = 0, past = 0; row < rows; row = past) {
    const std::vector<Span>& kept = of_row(spec.kept_keys, row);
    for (past = row + 1; past < rows && of_row(spec.kept_keys, past) == kept;) ++past;
    const Span batch = rows == 1 ? Span::range(0, shape.batch) : Span::range(row, past);
    for (const Slice& slice : slices) {
      Slice part = slice;
      part.batch = intersect(slice.batch, batch);
      if (is_empty(part)) continue;
      auto range = std::ranges::partition_point(kept, [&](const Span& keys) { return keys.last() < slice.keys.begin; });
      for (; range != kept.end() && range->begin <= slice.keys.last(); ++range) {
        part.keys = slice.keys.clip(range->begin, range->last());
        if (!is_empty(part)) parts.push_back(part);
      }
    }
  }
  return parts;
}

std::vector<Slice> within_mask(const std::shared_ptr<const TokenMask>& mask, const AttentionShape& shape,
                               const std::vector<Slice>& slices, MaskPlanes& planes) {
  const auto first_plane = static_cast<int64_t>(planes.size());
  for (int64_t plane = 0; plane < mask->planes(); ++plane) planes.push_back({mask, plane});
  const auto plane_at = [&](int64_t b, int64_t h) { return mask->plane_of[static_cast<size_t>(b * mask->heads + h)]; };
  const auto same_row = [&](int64_t b, int64_t other) {
    for (int64_t h = 0; h < mask->heads; ++h) {
      if (plane_at(b, h) != plane_at(other, h)) return false;
    }
    return true;
  };
  std::vector<Slice> shown;
  for (int64_t b = 0, past_b = 0; b < mask->batch; b = past_b) {
    for (past_b = b + 1; past_b < mask->batch && same_row(b, past_b);) ++past_b;
    const Span batch = mask->batch == 1 ? Span::range(0, shape.batch) : Span::range(b, past_b);
    for (int64_t h = 0, past_h = 0; h < mask->heads; h = past_h) {
      const int64_t plane = plane_at(b, h);
      for (past_h = h + 1; past_h < mask->heads && plane_at(b, past_h) == plane;) ++past_h;
      const Span heads = mask->heads == 1 ? Span::range(0, shape.heads) : Span::range(h, past_h);
      append_plane_blocks(mask->whole, plane, shape, batch, heads, shown);
      const size_t whole = shown.size();
      append_plane_blocks(mask->partial, plane, shape, batch, heads, shown);
      for (size_t i = whole; i < shown.size(); ++i) shown[i].mask = first_plane + plane;
    }
  }
  std::vector<Slice> parts;
  for (const Slice& slice : slices) {
    for (const Slice& block : shown) {
      const Slice part{intersect(slice.batch, block.batch),
                       intersect(slice.heads, block.heads),
                       intersect(slice.queries, block.queries),
                       intersect(slice.keys, block.keys),
                       slice.band,
                       block.mask};
      if (!is_empty(part)) parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace annulus
