// See pattern_check.h.
#include "runtime/pattern_check.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/pattern/block_map.h"

namespace annulus {
namespace {

PatternSpec replaced(PatternSpec spec, const AttentionShape& shape, bool causal) {
  causal = causal || spec.causal;
  for (PatternSpec& member : spec.members) member = replaced(std::move(member), shape, causal);
  if (spec.kind != PatternSpec::Kind::kBlocks || spec.blocks.map != BlocksSpec::Map::kAdaptive) return spec;
  const int64_t block = spec.blocks.block, keep = spec.blocks.keep;
  BlockMap map{.block = block,
               .query_blocks = ceil_div(shape.q_len, block),
               .key_blocks = ceil_div(shape.k_len, block),
               .offsets = {0},
               .runs = {}};
  for (int64_t i = 0; i < map.query_blocks; ++i) {
    const int64_t last = std::min(map.key_blocks, causal ? i + 1 : i + 1 + keep / 2);
    const int64_t begin = std::max<int64_t>(0, last - keep);
    const int64_t end = causal ? last : std::min(map.key_blocks, begin + keep);
    if (begin < end) map.runs.push_back({begin, end});
    map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
  }
  spec.blocks.map = BlocksSpec::Map::kGiven;
  spec.blocks.digest = map.digest();
  spec.blocks.given = std::make_shared<const BlockMap>(std::move(map));
  return spec;
}

}  // namespace

PatternSpec with_nearest_blocks(const PatternSpec& spec, const AttentionShape& shape) {
  return replaced(spec, shape, false);
}

void check_request(const PlanRequest& request) {
  validate(request);
  PlanRequest known = request;
  known.pattern = with_nearest_blocks(request.pattern, request.shape);
  cached_pattern(known);
}

}  // namespace annulus
