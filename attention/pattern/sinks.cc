// See slices.h. docs/explanation/attention.md, "Sink tokens", has the definition.
#include "attention/pattern/slices.h"

#include <algorithm>

#include "attention/pattern/checks.h"

namespace annulus {

void append_sinks(const PatternSpec& window, const PatternSpec& packed, const AttentionShape& shape,
                  std::vector<Slice>& slices) {
  const auto distance = [&](int64_t side) { return shape.query_offset + side; };
  const bool open_below = window.left == PatternSpec::kOpen, open_above = window.right == PatternSpec::kOpen;
  const Band near{open_below ? -Band::kUnbounded : distance(-window.left),
                  open_above ? Band::kUnbounded : distance(window.right)};
  const Band before{-Band::kUnbounded, near.lo - 1}, after{near.hi + 1, Band::kUnbounded};
  const bool causal = ends_with_query(window);
  for (const PackedRows& rows : packed_rows(packed, shape)) {
    for (size_t d = 0; d + 1 < rows.queries.size(); ++d) {
      const auto append = [&](int64_t begin, int64_t end, int64_t past_key, const Band& band) {
        const Slice slice{rows.batch, Span::range(0, shape.heads), Span::range(begin, end),
                          Span::range(rows.keys[d], past_key), band};
        if (!is_empty(slice)) slices.push_back(slice);
      };
      const int64_t begin = rows.queries[d], end = rows.queries[d + 1];
      const int64_t keys_end = rows.keys[d + 1], sinks_end = std::min(rows.keys[d] + window.sink_tokens, keys_end);
      // The first query that the window does not let see the first key. Kernels compute slices of the same queries
      // together, so that the window is cut there.
      const int64_t apart = open_below ? end : std::clamp(rows.keys[d] - near.lo + 1, begin, end);
      append(begin, apart, keys_end, near);
      append(apart, end, keys_end, near);
      append(apart, end, sinks_end, before);
      if (!causal && !open_above) append(begin, end, sinks_end, after);
    }
  }
}

}  // namespace annulus
