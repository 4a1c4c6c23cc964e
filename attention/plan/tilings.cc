// Counts the rows that tilings send; see tilings.h.
#include "attention/plan/tilings.h"

#include <memory>

#include "attention/plan/needs.h"
#include "attention/plan/traffic.h"

namespace annulus {
namespace {

// The layout in which `columns` consecutive ranks are one.
Layout joined(const Layout& layout, int columns) {
  Layout groups{layout.length, {}};
  for (size_t r = 0; r < layout.spans.size(); ++r) {
    if (r % static_cast<size_t>(columns) == 0) groups.spans.emplace_back();
    groups.spans.back().insert(groups.spans.back().end(), layout.spans[r].begin(), layout.spans[r].end());
  }
  return groups;
}

}  // namespace

double Tiling::bytes(int64_t head_dim, int64_t bytes, int64_t wide) const {
  const auto of = [&](BufferKind kind) {
    return static_cast<double>(row_content(kind, /*backward=*/false).bytes(head_dim, bytes, wide));
  };
  return kv_rows * static_cast<double>(head_dim * bytes) +
         query_rows * (of(BufferKind::kQueries) + of(BufferKind::kResults));
}

std::vector<Tiling> tilings(const PlanRequest& request) {
  validate(request);
  const std::shared_ptr<const Pattern> pattern = cached_pattern(request);
  const Layout queries = query_layout(request), keys = key_layout(request);
  const AttentionShape& shape = request.shape;
  std::vector<Tiling> all;
  for (int columns = 1; columns <= request.ranks; ++columns) {
    if (request.ranks % columns != 0) continue;
    // A group of ranks gets each row that its queries need from outside once, at the rank in the owner's column.
    const Layout of_queries = joined(queries, columns), of_keys = joined(keys, columns);
    Needs needs(*pattern, of_queries, of_keys);
    all.push_back({columns, 2 * static_cast<double>(needs.foreign_rows()),
                   static_cast<double>(columns - 1) * static_cast<double>(shape.batch * shape.heads * shape.q_len)});
  }
  return all;
}

}  // namespace annulus
