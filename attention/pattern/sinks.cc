// See sinks.h. docs/explanation/attention.md, "Sink tokens", has the definition.
#include "attention/pattern/sinks.h"

#include <algorithm>

#include "attention/pattern/restrict.h"

namespace annulus {

void append_sinks(const PatternSpec& window, const PatternSpec& packed, const AttentionShape& shape,
                  std::vector<Slice>& slices) {
  if (window.sink_tokens == 0) return;
  std::vector<Band> bands;
  if (window.left != PatternSpec::kOpen) bands.push_back({-Band::kUnbounded, shape.query_offset - window.left - 1});
  const bool causal = window.causal || window.right == 0;
  if (!causal && window.right != PatternSpec::kOpen) {
    bands.push_back({shape.query_offset + window.right + 1, Band::kUnbounded});
  }
  for (const PackedRows& rows : packed_rows(packed, shape)) {
    for (size_t d = 0; d + 1 < rows.queries.size(); ++d) {
      const int64_t end = std::min(rows.keys[d] + window.sink_tokens, rows.keys[d + 1]);
      for (const Band& band : bands) {
        const Slice slice{rows.batch, Span::range(0, shape.heads), Span::range(rows.queries[d], rows.queries[d + 1]),
                          Span::range(rows.keys[d], end), band};
        if (!is_empty(slice)) slices.push_back(slice);
      }
    }
  }
}

}  // namespace annulus
