// See layer_requests.h.
#include "runtime/layer_requests.h"

#include <algorithm>
#include <string>

#include "attention/plan/layout.h"
#include "runtime/block_map_file.h"
#include "runtime/pattern_check.h"

namespace annulus {
double LayerRequests::pairs_per_token() const {
  double pairs = 0;
  for (const size_t i : of_layer) {
    const AttentionShape& shape = distinct[i].shape;
    PlanRequest known = distinct[i];
    known.pattern = with_nearest_blocks(known.pattern, shape);
    pairs += static_cast<double>(count_pairs(*cached_pattern(known))) / static_cast<double>(shape.batch * shape.q_len);
  }
  return pairs;
}

LayerRequests layer_requests(const Config& c, int data_ranks, int context_ranks) {
  PlanRequest request{.shape = {.batch = c.data.batch / data_ranks,
                                .heads = c.model.heads,
                                .kv_heads = c.model.kv_heads,
                                .q_len = c.data.context,
                                .k_len = c.data.context,
                                .query_offset = 0},
                      .pattern = {},
                      .layout = parse_layout(c.attention.layout, "attention.layout"),
                      .schedule = parse_schedule(c.attention.schedule, "attention.schedule"),
                      .ranks = context_ranks,
                      .even = c.attention.even,
                      .uneven_lengths = {}};
  validate(request.shape);
  LayerRequests requests;
  std::vector<std::string> texts;
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    const std::string text = c.model.pattern.of(layer).text();
    const auto found = std::find(texts.begin(), texts.end(), text);
    requests.of_layer.push_back(static_cast<size_t>(found - texts.begin()));
    if (found != texts.end()) continue;
    texts.push_back(text);
    request.pattern = read_block_maps(c.model.pattern.of(layer), request.shape);
    check_request(request);
    requests.distinct.push_back(request);
  }
  return requests;
}

}  // namespace annulus
