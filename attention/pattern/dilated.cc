// See slices.h. docs/explanation/attention.md, "Dilated attention", has the definition.
#include "attention/pattern/slices.h"

namespace annulus {
namespace {

// The query heads that branch i computes.
Span branch_heads(const DilatedSpec& spec, int64_t i, int64_t heads) {
  if (spec.combine == DilatedSpec::Combine::kLse) return Span::range(0, heads);
  const int64_t groups = static_cast<int64_t>(spec.segment_lengths.size());
  const int64_t size = heads / groups, larger = heads % groups;  // the first `larger` groups have one more
  const auto begin = [&](int64_t group) { return group * size + std::min(group, larger); };
  return Span::range(begin(i), begin(i + 1));
}

// The heads whose offset is `offset`.
Span offset_heads(DilatedSpec::Offsets offsets, int64_t offset, int64_t rate, int64_t heads) {
  if (offsets == DilatedSpec::Offsets::kModulo) return {offset, rate, ceil_div(heads - offset, rate)};
  const int64_t group = ceil_div(heads, rate);
  return Span::range(offset * group, std::min(heads, (offset + 1) * group));
}

}  // namespace

void append_dilated(const DilatedSpec& spec, const AttentionShape& shape, std::vector<Slice>& slices) {
  for (size_t i = 0; i < spec.segment_lengths.size(); ++i) {
    const int64_t length = spec.segment_lengths[i], rate = spec.dilation_rates[i];
    const Span branch = branch_heads(spec, static_cast<int64_t>(i), shape.heads);
    const int64_t offsets = std::min(rate, shape.heads);
    // The segments, by position, that contain both queries and keys.
    const int64_t first = std::max<int64_t>(0, floor_div(shape.query_offset, length));
    const int64_t last =
        std::min(floor_div(shape.k_len - 1, length), floor_div(shape.q_len - 1 + shape.query_offset, length));
    for (int64_t segment = first; segment <= last; ++segment) {
      for (int64_t offset = 0; offset < offsets; ++offset) {
        const Span heads = intersect(offset_heads(spec.offsets, offset, rate, shape.heads), branch);
        if (heads.empty()) continue;
        const Span sampled{segment * length + offset, rate, (length - 1 - offset) / rate + 1};
        const Span keys = sampled.clip(0, shape.k_len - 1);
        Span queries = sampled.clip(shape.query_offset, shape.query_offset + shape.q_len - 1);
        queries.begin -= shape.query_offset;
        if (queries.empty() || keys.empty()) continue;
        slices.push_back({Span::range(0, shape.batch), heads, queries, keys, {}});
      }
    }
  }
}

}  // namespace annulus
