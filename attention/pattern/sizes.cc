// Bounds the number of slices of a pattern before any is made (require_size in checks.h).
#include <algorithm>
#include <cmath>

#include "attention/pattern/checks.h"
#include "attention/pattern/spec_names.h"
#include "common/text.h"

namespace annulus {
namespace {

using Map = BlocksSpec::Map;

constexpr int64_t kMostSlices = (int64_t{2} << 30) / static_cast<int64_t>(sizeof(Slice));

// Upper bounds, in floating point, because products of valid values may not fit 64 bits.
struct Size {
  double slices = 0;   // slices with pairs of one batch row
  double at_once = 0;  // those of them that contain one query; each border between documents adds that many
  double queries = 0;  // the queries of all slices, added up; documents cannot cut the slices into more parts than that
  double batches = 1;  // parts of the batch that have slices of their own

  double total() const { return slices * batches; }
};

// A bound on the runs that consist of every stride-th of the blocks within `reach` of a block.
double scattered(int64_t reach, int64_t stride, int64_t key_blocks) {
  return stride == 1 ? 1 : static_cast<double>(ceil_div(std::min(2 * reach + 1, key_blocks), stride) + 1);
}

// An upper bound on the number of runs of one query block.
double most_runs(const BlocksSpec& spec, int64_t key_blocks) {
  switch (spec.map) {
    case Map::kDilated:
      return scattered(spec.window_blocks, spec.rate, key_blocks);
    case Map::kBigBird:
      return 2 + static_cast<double>(std::min(spec.random_blocks, key_blocks));
    case Map::kStrided:
      return 1 + scattered(key_blocks, spec.stride, key_blocks);
    case Map::kHierarchical: {
      double sum = 0;
      for (const BlocksSpec::Level& level : spec.levels) sum += scattered(level.reach, level.stride, key_blocks);
      return std::min(sum, static_cast<double>(key_blocks) + 1);
    }
    default:
      return 2;
  }
}

Size size_of_map(const BlockMap& map, double q_len) {
  const int64_t per_row = map.heads * map.query_blocks;
  const auto runs = [&](int64_t row, int64_t rows) {
    return static_cast<double>(map.offsets[static_cast<size_t>(row + rows)] - map.offsets[static_cast<size_t>(row)]);
  };
  Size size;
  size.batches = static_cast<double>(map.batch);
  for (int64_t b = 0; b < map.batch; ++b) size.slices = std::max(size.slices, runs(b * per_row, per_row));
  for (int64_t row = 0; row < map.batch * per_row; ++row) size.at_once = std::max(size.at_once, runs(row, 1));
  size.at_once *= static_cast<double>(map.heads);
  size.queries = size.at_once * q_len;
  return size;
}

Size size_of_selection(const BlocksSpec& spec, const AttentionShape& shape, double query_blocks, double q_len) {
  if (spec.keep >= ceil_div(shape.k_len, spec.block))
    return {query_blocks, 1, q_len};  // all blocks are active: one map serves all heads and batch rows
  const double heads = static_cast<double>(shape.heads), batch = static_cast<double>(shape.batch);
  const double keep = static_cast<double>(spec.keep), limit = static_cast<double>(kMostSlices);
  if (query_blocks * batch * heads * keep > limit) {
    const double most = limit / (query_blocks * batch * heads), rows = std::floor(limit / (batch * heads * keep));
    std::string use = most >= 1 ? "keep = " + str(static_cast<int64_t>(most)) + " or less" : "";
    if (rows >= 1) {
      const int64_t least = ceil_div(ceil_div(shape.q_len, static_cast<int64_t>(rows)), 16) * 16;
      use += (use.empty() ? "" : ", or ") + std::string("blocks of ") + str(least) + " or more";
    }
    refuse_plan("an adaptive block map that keeps " + str(spec.keep) + " key blocks of " + str(spec.block) +
                " for each query block of " + counted(shape.q_len, "query") + ", " + counted(shape.batch, "batch row") +
                " and " + counted(shape.heads, "head") + " would hold more than " + str(kMostSlices) + " blocks; use " +
                (use.empty() ? "fewer batch rows or heads" : use));
  }
  return {query_blocks * heads * keep, heads * keep, heads * keep * q_len, batch};
}

Size size_of_blocks(const BlocksSpec& spec, const AttentionShape& shape) {
  const double q_len = static_cast<double>(shape.q_len);
  if (spec.given) return size_of_map(*spec.given, q_len);
  if (spec.map == Map::kFile) return {};  // checked again when it has been read
  const double query_blocks = static_cast<double>(ceil_div(shape.q_len, spec.block));
  if (spec.map == Map::kAdaptive) return size_of_selection(spec, shape, query_blocks, q_len);
  const bool by_head = spec.map == Map::kBigBird && spec.per_head && spec.random_blocks > 0;
  const double runs =
      most_runs(spec, ceil_div(shape.k_len, spec.block)) * (by_head ? static_cast<double>(shape.heads) : 1);
  if (query_blocks * runs > static_cast<double>(kMostSlices)) {
    refuse_plan("the block map of " + counted(shape.q_len, "query") + " and " + counted(shape.k_len, "key") +
                " in blocks of " + str(spec.block) + " could have more than " + str(kMostSlices) +
                " runs; use larger blocks or fewer scattered ones");
  }
  return {query_blocks * runs, runs, runs * q_len};
}

Size size_of_dilated(const DilatedSpec& spec, const AttentionShape& shape) {
  Size size;
  const int64_t branches = static_cast<int64_t>(spec.segment_lengths.size());
  const int64_t heads = spec.combine == DilatedSpec::Combine::kMean ? ceil_div(shape.heads, branches)
                                                                    : shape.heads;  // heads that compute one branch
  for (int64_t i = 0; i < branches; ++i) {
    const int64_t length = spec.segment_lengths[static_cast<size_t>(i)];
    const double offsets = static_cast<double>(std::min(spec.dilation_rates[static_cast<size_t>(i)], heads));
    size.slices += static_cast<double>(ceil_div(shape.k_len, length)) * offsets;
    size.at_once += offsets;
    size.queries += static_cast<double>(shape.q_len);  // the offsets share no position
  }
  if (size.slices > static_cast<double>(kMostSlices)) {
    refuse_plan("all branches of dilated attention over " + str(shape.k_len) + " positions could have more than " +
                str(kMostSlices) + " slices together; use longer segments");
  }
  return size;
}

Size size_of_tree(const TreeSpec& spec, const AttentionShape& shape) {
  // A border between documents cuts the keys of one node at most, and each part has keys of its own.
  Size size{0, 1, static_cast<double>(shape.q_len)};
  for (const auto& row : spec.lengths) size.slices = std::max(size.slices, static_cast<double>(row.size()));
  if (spec.lengths.size() > 1) size.batches = static_cast<double>(shape.batch);
  return size;
}

// Restricts a size to a mask. Each of its slices may meet each run of blocks.
void restrict_to(const TokenMask& mask, Size& size) {
  double slices = 0, at_once = 0;
  for (int64_t b = 0; b < mask.batch; ++b) {
    Size of_row;
    for (int64_t h = 0; h < mask.heads; ++h) {
      const size_t i = static_cast<size_t>(b * mask.heads + h);
      if (h > 0 && mask.plane_of[i] == mask.plane_of[i - 1]) continue;
      for (const BlockMap* map : {&mask.whole, &mask.partial}) {
        const int64_t first = mask.plane_of[i] * map->query_blocks;
        const auto runs = [&](int64_t row, int64_t rows) {
          return static_cast<double>(map->offsets[static_cast<size_t>(row + rows)] -
                                     map->offsets[static_cast<size_t>(row)]);
        };
        of_row.slices += runs(first, map->query_blocks);
        double most = 0;
        for (int64_t row = 0; row < map->query_blocks; ++row) most = std::max(most, runs(first + row, 1));
        of_row.at_once += most;
      }
    }
    slices = std::max(slices, of_row.slices), at_once = std::max(at_once, of_row.at_once);
  }
  size.slices *= slices, size.at_once *= at_once, size.queries *= at_once;
  size.batches = std::max(size.batches, static_cast<double>(mask.batch));
}

Size size_of(const PatternSpec& spec, const AttentionShape& shape);

Size size_of_kind(const PatternSpec& spec, const AttentionShape& shape) {
  Size size{1, 1, static_cast<double>(shape.q_len)};  // full, window
  switch (spec.kind) {
    case PatternSpec::Kind::kFull:
      break;
    case PatternSpec::Kind::kWindow:
      if (spec.sink_tokens > 0) size = {4, 4, 3 * size.queries};  // the window's two, and before and after it
      break;
    case PatternSpec::Kind::kDilated:
      size = size_of_dilated(spec.dilated, shape);
      break;
    case PatternSpec::Kind::kBlocks:
      size = size_of_blocks(spec.blocks, shape);
      break;
    case PatternSpec::Kind::kTree:
      size = size_of_tree(spec.tree, shape);
      break;
    case PatternSpec::Kind::kUnion:
      size = {};
      for (const PatternSpec& member : spec.members) {
        const Size part = size_of(member, shape);
        size.slices += part.slices, size.at_once += part.at_once, size.queries += part.queries;
        size.batches = std::max(size.batches, part.batches);
      }
      break;
    case PatternSpec::Kind::kSlices:
      size = {static_cast<double>(spec.slices.size()), static_cast<double>(spec.slices.size()), 0};
      for (const Slice& slice : spec.slices) size.queries += static_cast<double>(slice.queries.count);
      break;
  }
  return size;
}

Size within_documents_of(const PatternSpec& spec, const AttentionShape& shape, Size size) {
  size_t most = 0;
  for (const std::vector<int64_t>& list : spec.documents) most = std::max(most, list.size());
  if (most > 1) size.slices += size.at_once * static_cast<double>(most - 1);
  size.slices = std::min(size.slices, std::max(size.queries, 1.0));
  if (spec.documents.size() > 1 || spec.key_documents.size() > 1) size.batches = static_cast<double>(shape.batch);
  return size;
}

Size size_of(const PatternSpec& spec, const AttentionShape& shape) {
  Size size = size_of_kind(spec, shape);
  if (spec.mask.given) restrict_to(*spec.mask.given, size);
  const double before_documents = size.slices;  // at most so many of the slices contain one key
  if (!spec.documents.empty()) size = within_documents_of(spec, shape, size);
  size_t most = 0;
  for (const std::vector<Span>& row : spec.kept_keys) most = std::max(most, row.size());
  if (most > 1) {  // each border between kept keys adds the slices that contain the keys on both sides
    size.slices += before_documents * static_cast<double>(most - 1);
    size.at_once *= static_cast<double>(most), size.queries *= static_cast<double>(most);
  }
  if (spec.kept_keys.size() > 1) size.batches = static_cast<double>(shape.batch);
  return size;
}

}  // namespace

void require_size(const PatternSpec& spec, const AttentionShape& shape) {
  const double total = size_of(spec, shape).total();
  if (total <= static_cast<double>(kMostSlices)) return;
  refuse_plan("the pattern could have " + significant(total, 3) + " slices, but at most " + str(kMostSlices) +
              " (2 GiB) are allowed; use fewer documents, members or branches, or larger blocks and segments");
}

}  // namespace annulus
