// See any_pattern.h.
#include "attention/testing/any_pattern.h"

#include <rapidcheck.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace annulus::testing {
namespace {

using Kind = PatternSpec::Kind;
using Map = BlocksSpec::Map;

int64_t any(int64_t least, int64_t most) { return *rc::gen::inRange<int64_t>(least, most + 1); }
bool one_in(int64_t n) { return any(0, n - 1) == n - 1; }

DilatedSpec any_dilated(const AttentionShape& shape, bool within_union) {
  DilatedSpec d;
  for (int64_t i = any(1, 3); i > 0; --i) {
    d.segment_lengths.push_back(any(1, std::max<int64_t>({1, shape.q_len + shape.q_len / 2, shape.k_len})));
    d.dilation_rates.push_back(any(1, std::min<int64_t>(d.segment_lengths.back(), 7)));
  }
  d.offsets = *rc::gen::element(DilatedSpec::Offsets::kModulo, DilatedSpec::Offsets::kGroups);
  const bool may_mean = !within_union && static_cast<int64_t>(d.segment_lengths.size()) <= shape.heads;
  if (may_mean && one_in(3)) d.combine = DilatedSpec::Combine::kMean;
  return d;
}

BlocksSpec any_blocks(const AttentionShape& shape) {
  BlocksSpec b;
  b.block = shape.query_offset % 32 == 0 && one_in(3) ? 32 : 16;
  b.map = *rc::gen::element(Map::kLocal, Map::kDilated, Map::kGlobalLocal, Map::kBigBird, Map::kStrided,
                            Map::kHierarchical);
  b.window_blocks = any(0, 3);
  b.rate = any(1, 3);
  b.global_blocks = any(0, 2);
  b.random_blocks = any(0, 3);
  b.seed = any(0, 100);
  b.stride = any(1, 4);
  b.per_head = *rc::gen::arbitrary<bool>();
  for (int64_t i = any(1, 3); i > 0; --i) b.levels.push_back({any(1, 4), any(0, 5)});
  return b;
}

std::vector<int64_t> any_parents(size_t nodes) {
  std::vector<int64_t> parents, open = {-1};  // the node before with its ancestors, and -1 for a root
  for (size_t i = 0; i < nodes; ++i) {
    open.resize(static_cast<size_t>(any(1, static_cast<int64_t>(open.size()))));
    parents.push_back(open.back());
    open.push_back(static_cast<int64_t>(i));
  }
  return parents;
}

Span any_span(int64_t length) {
  const int64_t stride = *rc::gen::element<int64_t>(1, 1, 1, 2, 3), begin = any(0, std::max<int64_t>(0, length - 1));
  return {begin, stride, length == 0 ? 0 : any(1, (length - begin - 1) / stride + 1)};
}

std::vector<std::vector<int64_t>> any_lists(const AttentionShape& shape, int64_t length, int64_t count) {
  std::vector<std::vector<int64_t>> lists;
  for (int64_t rows = one_in(2) ? shape.batch : 1; rows > 0; --rows) lists.push_back(any_documents(length, count));
  if (lists.empty()) lists.push_back(any_documents(length, count));
  return lists;
}

TreeSpec any_tree(const AttentionShape& shape) {
  TreeSpec tree;
  tree.lengths = any_lists(shape, shape.q_len, any(1, 9));
  for (const std::vector<int64_t>& lengths : tree.lengths) tree.parents.push_back(any_parents(lengths.size()));
  return tree;
}

// Some ranges of the keys, with keys between them.
std::vector<Span> any_kept_keys(int64_t length) {
  std::vector<Span> kept;
  for (int64_t begin = any(0, 3); begin < length && kept.size() < 4; begin = kept.back().last() + 2 + any(0, 10)) {
    kept.push_back(Span::range(begin, std::min(length, begin + any(1, length))));
  }
  return kept;
}

PatternSpec any_of_kind(Kind kind, const AttentionShape& shape, int depth);

PatternSpec any_member(const AttentionShape& shape, int depth) {
  std::vector<Kind> kinds = {Kind::kFull, Kind::kWindow, Kind::kSlices, Kind::kDilated, Kind::kDilated};
  if (shape.q_len == shape.k_len && shape.query_offset == 0) kinds.insert(kinds.end(), {Kind::kTree, Kind::kTree});
  if (shape.query_offset % 16 == 0) kinds.insert(kinds.end(), {Kind::kBlocks, Kind::kBlocks});
  if (depth < 2) kinds.push_back(Kind::kUnion);
  return any_of_kind(*rc::gen::elementOf(kinds), shape, depth);
}

PatternSpec any_of_kind(Kind kind, const AttentionShape& shape, int depth) {
  PatternSpec spec;
  spec.kind = kind;
  spec.causal = *rc::gen::arbitrary<bool>();
  switch (spec.kind) {
    case Kind::kFull:
      break;
    case Kind::kWindow:
      spec.left = any(PatternSpec::kOpen, std::max<int64_t>(1, shape.k_len / 2));
      spec.right = one_in(3) ? 0 : any(PatternSpec::kOpen, std::max<int64_t>(1, shape.k_len / 2));
      if (one_in(2)) spec.sink_tokens = any(0, std::max<int64_t>(1, shape.k_len / 3));
      break;
    case Kind::kDilated:
      spec.dilated = any_dilated(shape, depth > 0);
      break;
    case Kind::kBlocks:
      spec.blocks = any_blocks(shape);
      break;
    case Kind::kTree:
      spec.tree = any_tree(shape);
      break;
    case Kind::kUnion:
      for (int64_t i = any(1, 3); i > 0; --i) spec.members.push_back(any_member(shape, depth + 1));
      break;
    case Kind::kSlices:
      for (int64_t i = any(0, 3); i > 0; --i) {
        spec.slices.push_back(
            {any_span(shape.batch), any_span(shape.heads), any_span(shape.q_len), any_span(shape.k_len), {}});
        if (*rc::gen::arbitrary<bool>()) spec.slices.back().band.hi = any(-30, 100);
        if (*rc::gen::arbitrary<bool>()) spec.slices.back().band.lo = any(-100, 30);
      }
      break;
  }
  if (one_in(4)) {
    const int64_t count = any(1, 5);
    spec.documents = any_lists(shape, shape.q_len, count);
    if (shape.q_len != shape.k_len || one_in(4)) {
      spec.key_documents = any_lists(shape, shape.k_len, count);
    }
  }
  if (shape.k_len > 0 && one_in(4)) {
    for (int64_t rows = one_in(2) ? shape.batch : 1; rows > 0; --rows) {
      spec.kept_keys.push_back(any_kept_keys(shape.k_len));
    }
    const auto none = [](const std::vector<Span>& row) { return row.empty(); };
    if (std::all_of(spec.kept_keys.begin(), spec.kept_keys.end(), none)) spec.kept_keys.clear();
  }
  return spec;
}

}  // namespace

std::vector<int64_t> any_documents(int64_t length, int64_t count) {
  std::vector<int64_t> cuts = {0, length};
  for (int64_t i = 1; i < count; ++i) cuts.push_back(any(0, length));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int64_t> lengths;
  for (size_t i = 1; i < cuts.size(); ++i) lengths.push_back(cuts[i] - cuts[i - 1]);
  return lengths;
}

BlockMap any_block_map(const AttentionShape& shape, int64_t block) {
  const int64_t batch = one_in(2) ? shape.batch : 1, heads = one_in(2) ? shape.heads : 1;
  const int64_t query_blocks = ceil_div(shape.q_len, block), key_blocks = ceil_div(shape.k_len, block);
  const auto active = *rc::gen::container<std::vector<uint8_t>>(
      static_cast<size_t>(batch * heads * query_blocks * key_blocks), rc::gen::inRange<uint8_t>(0, 2));
  return block_map_from_dense(active.data(), block, batch, heads, query_blocks, key_blocks);
}

TokenMask any_token_mask(const AttentionShape& shape) {
  const int64_t batch = one_in(2) ? shape.batch : 1, heads = one_in(2) ? shape.heads : 1;
  std::vector<uint8_t> shown(static_cast<size_t>(batch * heads * shape.q_len * shape.k_len));
  const auto at = [&](int64_t plane, int64_t query, int64_t key) -> uint8_t& {
    return shown[static_cast<size_t>((plane * shape.q_len + query) * shape.k_len + key)];
  };
  for (int64_t plane = 0; plane < batch * heads; ++plane) {
    const int64_t kind = any(0, 4), width = any(0, 150), many = any(1, 9);
    uint64_t state = static_cast<uint64_t>(any(0, 1'000'000));
    const auto draw = [&](int64_t n) {  // quicker than a draw of rapidcheck for each pair
      state = state * 6364136223846793005 + 1442695040888963407;
      return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(n));
    };
    for (int64_t query = 0; query < shape.q_len; ++query) {
      const int64_t end = draw(shape.k_len + 1);
      for (int64_t key = 0; key < shape.k_len; ++key) {
        const int64_t distance = key - query - shape.query_offset;
        at(plane, query, key) = kind == 0   ? draw(10) < many
                                : kind == 1 ? std::abs(distance) <= width
                                : kind == 2 ? key < end
                                            : kind == 3;
      }
    }
    if (shape.q_len > 0 && shape.k_len > 0) {
      const int64_t query = draw(shape.q_len), last = std::min(shape.k_len - 1, query + shape.query_offset);
      at(plane, query, last >= 0 ? draw(last + 1) : 0) = 255;
    }
  }
  if (shape.q_len > 0 && shape.k_len > 0) {
    const int64_t query = std::clamp<int64_t>(-shape.query_offset, 0, shape.q_len - 1);
    at(0, query, 0) = 1;
  }
  return token_mask_from_dense(shown.data(), batch, heads, shape.q_len, shape.k_len);
}

PatternSpec any_pattern(const AttentionShape& shape) { return any_member(shape, 0); }

PatternSpec with_any_mask(PatternSpec pattern, const AttentionShape& shape) {
  pattern.mask = given_mask(std::make_shared<const TokenMask>(any_token_mask(shape)));
  if (pattern.mask.given->nearest > shape.query_offset) {
    pattern.causal = false;
    if (pattern.kind == Kind::kWindow && pattern.right == 0) pattern.right = 1;
  }
  return pattern;
}

PatternSpec any_masked_union(const AttentionShape& shape) {
  PatternSpec all;
  all.kind = Kind::kUnion;
  all.members = {any_of_kind(Kind::kWindow, shape, 1), any_member(shape, 2)};
  if (shape.q_len == shape.k_len && shape.query_offset == 0) {
    all.members.push_back(any_of_kind(Kind::kTree, shape, 1));
  }
  PatternSpec& masked = all.members[static_cast<size_t>(any(0, static_cast<int64_t>(all.members.size()) - 1))];
  masked = with_any_mask(std::move(masked), shape);
  all.causal = masked.mask.given->nearest <= shape.query_offset && *rc::gen::arbitrary<bool>();
  return all;
}

}  // namespace annulus::testing
