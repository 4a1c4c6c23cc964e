// Rows as a whole, read from a dataset. Used by tests of the data and of training.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/pattern/span.h"
#include "runtime/data/dataset.h"

namespace annulus {

struct Row {
  std::vector<int64_t> tokens, targets;
};

inline Row whole(const Dataset& data, const DrawnRow& drawn) {
  const auto context = static_cast<size_t>(drawn.context);
  Row row{std::vector<int64_t>(context), std::vector<int64_t>(context)};
  data.read(drawn, {Span::range(0, drawn.context)}, row.tokens.data(), row.targets.data());
  return row;
}

inline Row whole_row(const Dataset& data, int64_t step, int64_t row) { return whole(data, data.drawn(step, row)); }

}  // namespace annulus
