// Caches patterns and the layouts dealt by them, by their shapes and specs: cached_pattern and cached_dealt_layout
// of plan.h.
#include <algorithm>
#include <utility>

#include "attention/plan/balance.h"
#include "attention/plan/plan.h"
#include "memory/caches.h"

namespace annulus {
namespace {

struct PatternKey {
  AttentionShape shape;
  PatternSpec pattern;

  uint64_t hash() const { return shape.hash() ^ pattern.hash(); }
  int64_t bytes() const { return static_cast<int64_t>(sizeof shape) + pattern.bytes(/*maps=*/false); }
  friend bool operator==(const PatternKey&, const PatternKey&) = default;
};

// With the masks, which it keeps.
int64_t pattern_bytes(const Pattern& pattern) {
  auto bytes = static_cast<int64_t>(sizeof pattern + pattern.slices.size() * sizeof(Slice));
  for (size_t i = 0; i < pattern.masks.size(); ++i) {
    if (i == 0 || pattern.masks[i].mask != pattern.masks[i - 1].mask) bytes += pattern.masks[i].mask->bytes();
  }
  return bytes;
}

struct LayoutKey {
  PatternKey dealt_by;
  LayoutKind kind = LayoutKind::kBalanced;
  int ranks = 0;

  uint64_t hash() const {
    return dealt_by.hash() ^ static_cast<uint64_t>(ranks) << 40 ^ static_cast<uint64_t>(kind) << 60;
  }
  int64_t bytes() const { return dealt_by.bytes() + static_cast<int64_t>(sizeof kind + sizeof ranks); }
  friend bool operator==(const LayoutKey&, const LayoutKey&) = default;
};

int64_t layout_bytes(const Layout& layout) {
  auto bytes = static_cast<int64_t>(sizeof layout);
  for (const std::vector<Span>& spans : layout.spans) {
    bytes += static_cast<int64_t>(sizeof spans + spans.size() * sizeof(Span));
  }
  return bytes;
}

// Raises the numbers of batch rows and heads to those that a pattern tells apart.
void raise_to(const PatternSpec& spec, AttentionShape& shape) {
  const auto raise = [](int64_t& number, int64_t to) { number = std::max(number, to); };
  for (const PatternSpec& member : spec.members) raise_to(member, shape);
  for (const size_t rows : {spec.documents.size(), spec.key_documents.size(), spec.kept_keys.size(),
                            spec.tree.lengths.size(), spec.tree.parents.size()}) {
    raise(shape.batch, static_cast<int64_t>(rows));
  }
  if (spec.kind == PatternSpec::Kind::kBlocks && spec.blocks.given) {
    raise(shape.batch, spec.blocks.given->batch);
    raise(shape.heads, spec.blocks.given->heads);
  }
  // A slice that names no batch rows or heads has all there can be, far beyond the limit of a shape (pattern.h).
  constexpr int64_t kMost = int64_t{1} << 24;
  const auto raise_past = [&](int64_t& number, const Span& named) {
    if (!named.empty() && named.last() < kMost) raise(number, named.last() + 1);
  };
  for (const Slice& slice : spec.slices) raise_past(shape.batch, slice.batch), raise_past(shape.heads, slice.heads);
  raise(shape.heads, output_divisor(spec));  // branches whose outputs are averaged need a head each
}

// The shape by which a layout is dealt. What is cut before a call, such as tokens, has no heads, and calls of other
// heads or rows must have the same layout; so it follows from the lengths and the pattern alone. A pattern that draws
// for each head is dealt by what the first ones draw.
AttentionShape dealt_shape(const PatternSpec& spec, const AttentionShape& of) {
  AttentionShape shape{.batch = 1,
                       .heads = 1,
                       .kv_heads = 1,
                       .q_len = of.q_len,
                       .k_len = of.k_len,
                       .query_offset = of.q_len == of.k_len ? 0 : of.query_offset};
  raise_to(spec, shape);
  return shape;
}

}  // namespace

std::shared_ptr<const Layout> cached_dealt_layout(const PlanRequest& request) {
  static auto& cache = *new NamedCache<Layout, LayoutKey>("layouts");  // never destroyed, as in cached_pattern
  PatternSpec by = without_masks(request.balance_by ? *request.balance_by : request.pattern);
  const AttentionShape shape = dealt_shape(by, request.shape);
  if (is_adaptive(by)) by = with_nearest_blocks(with_causal_members(std::move(by)), shape);
  const auto deal = [&] {
    const Pattern pattern = make_pattern(by, shape);
    return request.layout == LayoutKind::kPerDocument ? per_document_layout(pattern, request.ranks)
                                                      : balanced_layout(pattern, request.ranks);
  };
  return cache.get({{shape, by}, request.layout, request.ranks}, deal, layout_bytes);
}

std::shared_ptr<const Pattern> cached_pattern(const PlanRequest& request) {
  // It is never destroyed, because a thread that plans ahead may use it until the process ends.
  static auto& cache = *new NamedCache<Pattern, PatternKey>("patterns");
  return cache.get(
      {request.shape, request.pattern}, [&] { return make_pattern(request.pattern, request.shape); }, pattern_bytes);
}

}  // namespace annulus
