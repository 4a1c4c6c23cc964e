// The definitions of docs/explanation/attention.md as predicates over pairs, and as factors of pairs; see oracle.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/oracle/draws.h"
#include "attention/oracle/oracle.h"
#include "attention/oracle/selection.h"

namespace annulus {

namespace {

// What adaptive maps are selected from; nothing where there are none.
struct Selecting {
  const at::Tensor *q = nullptr, *k = nullptr;
};

using Lists = std::vector<std::vector<int64_t>>;

// The documents of the keys of the nearest pattern around that has documents; none: the row is one.
const Lists kWholeRows;

Count count_within(const PatternSpec& spec, bool causal, const AttentionShape& shape, const Selecting& from,
                   const Lists& parts = kWholeRows);

// The number of the segment or block of length n that contains x, and the index of x in it.
int64_t part_of(int64_t x, int64_t n) { return x >= 0 ? x / n : -((n - 1 - x) / n); }
int64_t place_in(int64_t x, int64_t n) { return x - part_of(x, n) * n; }

// For each index the number of the document that contains it.
std::vector<int64_t> numbers_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> numbers;
  for (size_t d = 0; d < lengths.size(); ++d) {
    numbers.insert(numbers.end(), static_cast<size_t>(lengths[d]), static_cast<int64_t>(d));
  }
  return numbers;
}

Count same_document(const PatternSpec& spec) {
  std::vector<std::vector<int64_t>> of_queries, of_keys;
  for (const auto& row : spec.documents) of_queries.push_back(numbers_of(row));
  for (const auto& row : spec.key_documents.empty() ? spec.documents : spec.key_documents) {
    of_keys.push_back(numbers_of(row));
  }
  return [of_queries, of_keys](int64_t batch, int64_t, int64_t query, int64_t key) -> int64_t {
    const auto row = static_cast<size_t>(batch);
    return of_queries[of_queries.size() == 1 ? 0 : row][static_cast<size_t>(query)] ==
           of_keys[of_keys.size() == 1 ? 0 : row][static_cast<size_t>(key)];
  };
}

// Whether a key is no padding.
Count kept(const PatternSpec& spec) {
  return [rows = spec.kept_keys](int64_t batch, int64_t, int64_t, int64_t key) -> int64_t {
    const std::vector<Span>& ranges = rows[rows.size() == 1 ? 0 : static_cast<size_t>(batch)];
    const auto after = std::upper_bound(ranges.begin(), ranges.end(), key,
                                        [](int64_t x, const Span& range) { return x < range.begin; });
    return after != ranges.begin() && key < std::prev(after)->begin + std::prev(after)->count;
  };
}

// Whether a mask of tokens shows a pair. It is read block by block: whole ones, and those with bits.
Count shown(const MaskSpec& spec) {
  if (!spec.given) throw std::logic_error("[oracle] the mask has not been read: " + spec.file + spec.digest);
  const std::shared_ptr<const TokenMask>& mask = spec.given;
  return [mask](int64_t batch, int64_t head, int64_t query, int64_t key) -> int64_t {
    const int64_t b = mask->batch == 1 ? 0 : batch, h = mask->heads == 1 ? 0 : head;
    const int64_t plane = mask->plane_of[static_cast<size_t>(b * mask->heads + h)], block = key / 128;
    const auto row = static_cast<size_t>(plane * ((mask->queries + 127) / 128) + query / 128);
    for (int64_t r = mask->whole.offsets[row]; r < mask->whole.offsets[row + 1]; ++r) {
      const BlockRun& run = mask->whole.runs[static_cast<size_t>(r)];
      if (run.begin <= block && block < run.end) return 1;
    }
    int64_t before = 0;  // partly shown blocks
    for (int64_t r = mask->partial.offsets[row]; r < mask->partial.offsets[row + 1]; ++r) {
      const BlockRun& run = mask->partial.runs[static_cast<size_t>(r)];
      if (run.begin <= block && block < run.end) {
        const auto at = static_cast<size_t>(plane * mask->queries + query);
        const int64_t first = mask->stored->word_of.empty() ? -1 : mask->stored->word_of[at];
        if (first < 0) throw std::logic_error("[oracle] the bits of the mask are not held here");
        const int64_t bit = 128 * (before + block - run.begin) + key % 128;
        return static_cast<int64_t>(mask->stored->words[static_cast<size_t>(first + bit / 64)] >> (bit % 64) & 1);
      }
      before += run.end - run.begin;
    }
    return 0;
  };
}

Count dilated(const DilatedSpec& d, const AttentionShape& shape) {
  return [d, shape](int64_t, int64_t head, int64_t query, int64_t key) -> int64_t {
    const int64_t branches = static_cast<int64_t>(d.segment_lengths.size()), position = query + shape.query_offset;
    int64_t count = 0, group_end = 0;
    for (int64_t i = 0; i < branches; ++i) {
      const int64_t w = d.segment_lengths[static_cast<size_t>(i)], r = d.dilation_rates[static_cast<size_t>(i)];
      const int64_t group_begin = group_end;
      group_end += shape.heads / branches + (i < shape.heads % branches);
      if (d.combine == DilatedSpec::Combine::kMean && (head < group_begin || head >= group_end)) continue;
      const int64_t offset = d.offsets == DilatedSpec::Offsets::kModulo ? head % r : head / ((shape.heads + r - 1) / r);
      count += part_of(key, w) == part_of(position, w) && place_in(position, w) % r == offset &&
               place_in(key, w) % r == offset;
    }
    return count;
  };
}

// The key blocks that bigbird draws, ascending, for each query block of each head that draws for itself. E is written
// as its two ranges, before the window and after it, so that a long sequence costs no more than its draws.
std::vector<std::vector<int64_t>> drawn_blocks(const BlocksSpec& b, bool causal, const AttentionShape& shape) {
  const int64_t query_blocks = (shape.q_len + b.block - 1) / b.block;
  const int64_t key_blocks = (shape.k_len + b.block - 1) / b.block;
  std::vector<std::vector<int64_t>> drawn;
  for (int64_t head = 0; head < (b.per_head ? shape.heads : 1); ++head) {
    for (int64_t i = 0; i < query_blocks; ++i) {
      const int64_t bi = i + part_of(shape.query_offset, b.block);
      const int64_t before = std::max<int64_t>(0, std::min(bi - b.window_blocks, key_blocks) - b.global_blocks);
      const int64_t after_begin = std::max(b.global_blocks, bi + b.window_blocks + 1);
      const int64_t after = causal ? 0 : std::max<int64_t>(0, key_blocks - after_begin);
      int64_t eligible = before + after;
      if (!causal && bi >= 0 && bi < b.global_blocks) eligible = 0;  // it sees every block
      using oracle_draws::mix;
      const uint64_t key =
          mix(mix(mix(static_cast<uint64_t>(b.seed)) ^ static_cast<uint64_t>(head)) ^ static_cast<uint64_t>(bi));
      std::vector<int64_t> row;  // numbers of elements of E, ascending
      for (int64_t t = 0; t < std::min(b.random_blocks, eligible); ++t) {
        auto element = static_cast<int64_t>(mix(key + static_cast<uint64_t>(t)) % static_cast<uint64_t>(eligible - t));
        auto place = row.begin();  // among those that were removed before
        for (; place != row.end() && *place <= element; ++place) ++element;
        row.insert(place, element);
      }
      for (int64_t& x : row) x = x < before ? b.global_blocks + x : after_begin + (x - before);
      drawn.push_back(std::move(row));
    }
  }
  return drawn;
}

// A map that has been read, or that a program has given. Its query blocks are numbered by index.
Count given(const std::shared_ptr<const BlockMap>& map) {
  return [map](int64_t batch, int64_t head, int64_t query, int64_t key) -> int64_t {
    const int64_t plane = (map->batch == 1 ? 0 : batch) * map->heads + (map->heads == 1 ? 0 : head);
    const auto row = static_cast<size_t>(plane * map->query_blocks + query / map->block);
    const auto first = map->runs.begin() + map->offsets[row], past = map->runs.begin() + map->offsets[row + 1];
    const auto after = std::upper_bound(first, past, key / map->block,
                                        [](int64_t block, const BlockRun& run) { return block < run.begin; });
    return after != first && key / map->block < std::prev(after)->end;
  };
}

Count adaptive(const BlocksSpec& b, bool causal, const AttentionShape& shape, const Selecting& from) {
  const std::vector<uint8_t> active = oracle_selection::selected_blocks(b, causal, shape, *from.q, *from.k);
  const int64_t query_blocks = (shape.q_len + b.block - 1) / b.block;
  const int64_t key_blocks = (shape.k_len + b.block - 1) / b.block;
  return [=, heads = shape.heads, block = b.block](int64_t batch, int64_t head, int64_t query, int64_t key) -> int64_t {
    return active[static_cast<size_t>(((batch * heads + head) * query_blocks + query / block) * key_blocks +
                                      key / block)];
  };
}

Count blocks(const BlocksSpec& b, bool causal, const AttentionShape& shape, const Selecting& from) {
  using Map = BlocksSpec::Map;
  if (b.given) return given(b.given);
  if (b.map == Map::kFile) throw std::logic_error("[oracle] the block map has not been read: " + b.file);
  if (b.map == Map::kAdaptive) {
    if (!from.q) throw std::logic_error("[oracle] an adaptive map is defined by q and k; count_of needs them");
    return adaptive(b, causal, shape, from);
  }
  std::vector<std::vector<int64_t>> drawn;
  if (b.map == Map::kBigBird) drawn = drawn_blocks(b, causal, shape);
  const int64_t query_blocks = (shape.q_len + b.block - 1) / b.block;
  return [b, causal, shape, drawn, query_blocks](int64_t, int64_t head, int64_t query, int64_t key) -> int64_t {
    const int64_t bi = part_of(query + shape.query_offset, b.block), bj = key / b.block;
    const int64_t distance = std::abs(bi - bj);
    const bool near = distance <= b.window_blocks;
    const bool global = bj < b.global_blocks || (!causal && bi >= 0 && bi < b.global_blocks);
    switch (b.map) {
      case Map::kLocal:
        return near;
      case Map::kDilated:
        return near && distance % b.rate == 0;
      case Map::kGlobalLocal:
        return near || global;
      case Map::kBigBird: {
        const auto row = static_cast<size_t>((b.per_head ? head : 0) * query_blocks + query / b.block);
        return near || global || std::binary_search(drawn[row].begin(), drawn[row].end(), bj);
      }
      case Map::kStrided:
        return near || bj % b.stride == b.stride - 1;
      case Map::kHierarchical:
        return std::any_of(b.levels.begin(), b.levels.end(), [&](const BlocksSpec::Level& level) {
          return distance <= level.reach && bj % level.stride == level.stride - 1;
        });
      case Map::kAdaptive:
      case Map::kFile:
      case Map::kGiven:
        break;  // handled above
    }
    return 0;
  };
}

// A window, and the first keys of each part of its row: later queries see them, and all do if no side is causal.
Count window(const PatternSpec& spec, bool causal, const AttentionShape& shape, const Lists& parts) {
  Lists places;  // of each key its place in its part
  for (const std::vector<int64_t>& lengths : parts) {
    places.emplace_back();
    for (const int64_t length : lengths) {
      for (int64_t i = 0; i < length; ++i) places.back().push_back(i);
    }
  }
  const bool past = causal || spec.right == 0;
  return [spec, shape, places, past](int64_t batch, int64_t, int64_t query, int64_t key) -> int64_t {
    const int64_t position = query + shape.query_offset;
    if ((spec.left == -1 || key >= position - spec.left) && (spec.right == -1 || key <= position + spec.right))
      return 1;
    const auto row = static_cast<size_t>(batch);
    const int64_t place = places.empty() ? key : places[places.size() == 1 ? 0 : row][static_cast<size_t>(key)];
    return place < spec.sink_tokens && (!past || key <= position);
  };
}

// Walks from the query's node to its root by parents, for the node that has the key.
Count tree(const TreeSpec& tree) {
  std::vector<std::vector<int64_t>> nodes;  // of each batch row: the node of each token
  for (const std::vector<int64_t>& lengths : tree.lengths) nodes.push_back(numbers_of(lengths));
  return [nodes, parents = tree.parents](int64_t batch, int64_t, int64_t query, int64_t key) -> int64_t {
    const size_t row = nodes.size() == 1 ? 0 : static_cast<size_t>(batch);
    const int64_t of_key = nodes[row][static_cast<size_t>(key)];
    int64_t node = nodes[row][static_cast<size_t>(query)];
    while (node != -1 && node != of_key) node = parents[row][static_cast<size_t>(node)];
    return node != -1 && key <= query;
  };
}

Count unrestricted(const PatternSpec& spec, bool causal, const AttentionShape& shape, const Selecting& from,
                   const Lists& parts) {
  switch (spec.kind) {
    case PatternSpec::Kind::kFull:
      break;
    case PatternSpec::Kind::kWindow:
      return window(spec, causal, shape, parts);
    case PatternSpec::Kind::kDilated:
      return dilated(spec.dilated, shape);
    case PatternSpec::Kind::kBlocks:
      return blocks(spec.blocks, causal, shape, from);
    case PatternSpec::Kind::kTree:
      return tree(spec.tree);
    case PatternSpec::Kind::kUnion: {
      std::vector<Count> members;
      for (const PatternSpec& member : spec.members) {
        members.push_back(count_within(member, causal, shape, from, parts));
      }
      return [members](int64_t batch, int64_t head, int64_t query, int64_t key) {
        int64_t sum = 0;
        for (const Count& count : members) sum += count(batch, head, query, key);
        return sum;
      };
    }
    case PatternSpec::Kind::kSlices:
      return [slices = spec.slices](int64_t batch, int64_t head, int64_t query, int64_t key) {
        int64_t sum = 0;
        for (const Slice& s : slices) {
          sum += s.batch.contains(batch) && s.heads.contains(head) && s.queries.contains(query) &&
                 s.keys.contains(key) && s.band.lo <= key - query && key - query <= s.band.hi;
        }
        return sum;
      };
  }
  return [](int64_t, int64_t, int64_t, int64_t) -> int64_t { return 1; };
}

// The count of a pattern within unions of which one or none is causal. That restricts its members, and what their maps
// draw and select depends on it.
Count count_within(const PatternSpec& spec, bool causal_around, const AttentionShape& shape, const Selecting& from,
                   const Lists& parts_around) {
  const bool causal = causal_around || spec.causal;
  const Lists& own = spec.key_documents.empty() ? spec.documents : spec.key_documents;
  const Count count = unrestricted(spec, causal, shape, from, own.empty() ? parts_around : own);
  const Count together = spec.documents.empty() ? Count() : same_document(spec);
  const Count keeps = spec.kept_keys.empty() ? Count() : kept(spec);
  const Count shows = spec.mask.empty() ? Count() : shown(spec.mask);
  return [count, together, keeps, shows, causal, offset = shape.query_offset](int64_t batch, int64_t head,
                                                                              int64_t query, int64_t key) -> int64_t {
    if (causal && key > query + offset) return 0;
    if (together && !together(batch, head, query, key)) return 0;
    if (keeps && !keeps(batch, head, query, key)) return 0;
    if (shows && !shows(batch, head, query, key)) return 0;
    return count(batch, head, query, key);
  };
}

}  // namespace

Count count_of(const PatternSpec& pattern, const AttentionShape& shape) {
  validate(pattern, shape);
  return count_within(pattern, false, shape, {});
}

Count count_of(const PatternSpec& pattern, const AttentionShape& shape, const at::Tensor& q, const at::Tensor& k) {
  validate(pattern, shape);
  return count_within(pattern, false, shape, {&q, &k});
}

namespace {

bool has_slices(const PatternSpec& spec) {
  return spec.kind == PatternSpec::Kind::kSlices || std::any_of(spec.members.begin(), spec.members.end(), has_slices);
}

PatternSpec with_slices(PatternSpec spec, const std::function<bool(const Slice&)>& wanted) {
  for (PatternSpec& member : spec.members) member = with_slices(std::move(member), wanted);
  std::erase_if(spec.slices, [&](const Slice& slice) { return !wanted(slice); });
  return spec;
}

}  // namespace

RowCounts::RowCounts(const PatternSpec& spec, const AttentionShape& shape)
    : spec_(spec), shape_(shape), all_(std::make_shared<const Count>(count_of(spec, shape))) {}

std::shared_ptr<const Count> RowCounts::of_query(int64_t batch, int64_t head, int64_t query) const {
  if (!has_slices(spec_)) return all_;
  const auto wanted = [&](const Slice& s) {
    return s.batch.contains(batch) && s.heads.contains(head) && s.queries.contains(query);
  };
  return std::make_shared<const Count>(count_within(with_slices(spec_, wanted), false, shape_, {}));
}

std::shared_ptr<const Count> RowCounts::of_key(int64_t batch, int64_t key) const {
  if (!has_slices(spec_)) return all_;
  const auto wanted = [&](const Slice& s) { return s.batch.contains(batch) && s.keys.contains(key); };
  return std::make_shared<const Count>(count_within(with_slices(spec_, wanted), false, shape_, {}));
}

PairWeight weight_of(const OracleDropout& dropout) {
  if (dropout.rate == 0) return {};
  return [dropout, drops = std::floor(dropout.rate * 0x1p32 + 0.5)](int64_t batch, int64_t head, int64_t query,
                                                                    int64_t key) {
    using oracle_draws::mix;
    uint64_t generator = mix(dropout.seed);
    for (const int64_t part : {dropout.step, dropout.layer, dropout.first_row + batch, head}) {
      generator = mix(generator ^ static_cast<uint64_t>(part));
    }
    const auto halves = [](uint64_t x) {
      return std::array<uint32_t, 2>{static_cast<uint32_t>(x), static_cast<uint32_t>(x >> 32)};
    };
    const auto low = halves(static_cast<uint64_t>(key / 4)), high = halves(static_cast<uint64_t>(query));
    const auto words = oracle_draws::philox4x32_10({low[0], low[1], high[0], high[1]}, halves(generator));
    return static_cast<double>(words[static_cast<size_t>(key % 4)]) < drops ? 0 : 1 / (1 - dropout.rate);
  };
}

}  // namespace annulus
