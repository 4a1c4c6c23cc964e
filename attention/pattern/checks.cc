// See checks.h. This file also has the public validate() of shapes and of patterns for shapes (pattern.h).
#include "attention/pattern/checks.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "attention/pattern/slices.h"
#include "attention/pattern/spec_names.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

std::string outside(std::string_view key, int64_t value, int64_t least) {
  if (value >= least && value <= kLongest) return "";
  return "\"" + std::string(key) + "\" must be between " + str(least) + " and 2^40, got " + str(value);
}

std::string fault_of(const DilatedSpec& d) {
  const size_t n = d.segment_lengths.size();
  if (n != d.dilation_rates.size()) {
    return "each segment length needs its dilation rate: got " + std::to_string(n) + " segment_lengths and " +
           std::to_string(d.dilation_rates.size()) + " dilation_rates";
  }
  if (n == 0) {
    return "dilated attention needs a branch, as in segment_lengths = [2048, 4096], dilation_rates = [1, 2]";
  }
  for (size_t i = 0; i < n; ++i) {
    const int64_t w = d.segment_lengths[i], r = d.dilation_rates[i];
    if (w < 1 || w > kLongest) return "a segment length must be between 1 and 2^40, got " + str(w);
    if (r < 1 || r > w) {
      return "the dilation rate of segments of " + str(w) + " must be between 1 and " + str(w) + ", got " + str(r);
    }
  }
  return "";
}

std::string fault_of(const BlocksSpec& b) {
  if (b.block < 16 || b.block > kLongest || b.block % 16 != 0) {
    return "\"block\" must be a multiple of 16 tokens between 16 and 2^40, got " + str(b.block);
  }
  for (const auto& [key, value, least] :
       {std::tuple{"window_blocks", b.window_blocks, 0}, std::tuple{"rate", b.rate, 1},
        std::tuple{"global_blocks", b.global_blocks, 0}, std::tuple{"random_blocks", b.random_blocks, 0},
        std::tuple{"stride", b.stride, 1}, std::tuple{"keep", b.keep, 1}}) {
    if (const std::string fault = outside(key, value, least); !fault.empty()) return fault;
  }
  if (b.map == BlocksSpec::Map::kHierarchical && b.levels.empty()) {
    return "\"levels\" needs at least one [stride, reach], as in levels = [[1, 2], [4, 16]]";
  }
  for (const BlocksSpec::Level& level : b.levels) {
    if (level.stride < 1 || level.stride > kLongest || level.reach < 0 || level.reach > kLongest) {
      return "a level is [stride, reach] in blocks, with stride from 1 to 2^40 and reach from 0 to 2^40, got [" +
             str(level.stride) + ", " + str(level.reach) + "]";
    }
  }
  if (b.map == BlocksSpec::Map::kFile && b.file.empty()) return "\"file\" must name a safetensors file";
  return "";
}

std::string fault_of(const Span& span, std::string_view name) {
  if (span.begin >= 0 && span.begin <= kLongest && span.stride >= 1 && span.stride <= kLongest && span.count >= 0 &&
      span.count <= kLongest) {
    return "";
  }
  return "\"" + std::string(name) +
         "\" of a slice is [begin, stride, count] with begin and count of at least 0, stride of " +
         "at least 1 and none above 2^40; got [" + str(span.begin) + ", " + str(span.stride) + ", " + str(span.count) +
         "]";
}

std::string fault_of(const Slice& s) {
  for (const auto& [span, name] : {std::pair{&s.queries, "queries"}, std::pair{&s.keys, "keys"},
                                   std::pair{&s.heads, "heads"}, std::pair{&s.batch, "batch"}}) {
    if (const std::string fault = fault_of(*span, name); !fault.empty()) return fault;
  }
  return "";
}

std::string fault_of(const std::vector<std::vector<int64_t>>& lists, std::string_view name) {
  for (const std::vector<int64_t>& list : lists) {
    int64_t sum = 0;
    for (const int64_t length : list) {
      if (length < 0) return "\"" + std::string(name) + "\" must be lengths of at least 0, got " + str(length);
      if (length > kLongest || (sum += length) > kLongest) return "\"" + std::string(name) + "\" add up to over 2^40";
    }
  }
  return "";
}

std::string fault_of(const TreeSpec& tree) {
  if (tree.lengths.empty() || tree.lengths.size() != tree.parents.size()) {
    return "\"lengths\" and \"parents\" of a tree are one list each for all batch rows, or one for each of them; got " +
           counted(static_cast<int64_t>(tree.lengths.size()), "list") + " of lengths and " +
           std::to_string(tree.parents.size()) + " of parents";
  }
  for (size_t row = 0; row < tree.lengths.size(); ++row) {
    const std::string fault = tree_fault(tree.lengths[row], tree.parents[row]);
    if (fault.empty()) continue;
    return (tree.lengths.size() > 1 ? "batch row " + std::to_string(row) + ": " : "") + fault;
  }
  return "";
}

std::string fault_of(const std::vector<std::vector<Span>>& rows) {
  bool any = rows.empty();
  for (const std::vector<Span>& row : rows) {
    int64_t past = -1;
    for (const Span& keys : row) {
      if (keys.stride != 1 || keys.empty() || keys.begin <= past || keys.begin < 0 || keys.last() >= kLongest) {
        return "\"kept_keys\" must be ranges [begin, end) of keys that ascend, with other keys between them; got [" +
               str(keys.begin) + ", " + str(keys.begin + keys.count) + "]" +
               (past < 0 ? "" : " after one that ends with " + str(past));
      }
      past = keys.begin + keys.count;
      any = true;
    }
  }
  return any ? "" : "\"kept_keys\" keeps no key of any batch row, so no query would see a key";
}

std::string fault_of(const PatternSpec& spec, int depth) {
  if (depth > kDeepest) return "unions may be nested " + str(kDeepest) + " deep, but not deeper";
  std::string fault;
  switch (spec.kind) {
    case PatternSpec::Kind::kFull:
      break;
    case PatternSpec::Kind::kWindow:
      for (const auto& [key, value] : {std::pair{"left", spec.left}, {"right", spec.right}}) {
        if (!fault.empty() || value == PatternSpec::kOpen) continue;
        fault = outside(key, value, 0);
        if (!fault.empty()) fault += "; -1 stands for a side without a bound";
      }
      if (fault.empty()) fault = outside("sink_tokens", spec.sink_tokens, 0);
      break;
    case PatternSpec::Kind::kDilated:
      fault = fault_of(spec.dilated);
      break;
    case PatternSpec::Kind::kBlocks:
      fault = fault_of(spec.blocks);
      break;
    case PatternSpec::Kind::kTree:
      fault = fault_of(spec.tree);
      break;
    case PatternSpec::Kind::kSlices:
      for (const Slice& slice : spec.slices) {
        if (fault.empty()) fault = fault_of(slice);
      }
      break;
    case PatternSpec::Kind::kUnion:
      if (spec.members.empty()) fault = "a union needs members, as in of = [{ kind = \"causal\" }, ...]";
      for (const PatternSpec& member : spec.members) {
        if (fault.empty()) fault = fault_of(member, depth + 1);
        const bool dilated = member.kind == PatternSpec::Kind::kDilated;
        if (fault.empty() && dilated && member.dilated.combine == DilatedSpec::Combine::kMean) {
          fault = "combine = \"mean\" divides the whole output, so a union may not contain it; use combine = \"lse\"";
        }
      }
      break;
  }
  if (fault.empty()) fault = fault_of(spec.documents, "documents");
  if (fault.empty()) fault = fault_of(spec.key_documents, "key_documents");
  if (fault.empty() && spec.documents.empty() && !spec.key_documents.empty()) {
    fault = "\"key_documents\" needs \"documents\", the lengths of the queries' documents";
  }
  if (fault.empty()) fault = fault_of(spec.kept_keys);
  if (fault.empty() && !spec.mask.empty() && std::any_of(spec.members.begin(), spec.members.end(), has_mask)) {
    fault = "a union with a mask may not have members with masks of their own: combine the masks into one";
  }
  return fault;
}

// Checks the documents of the queries or of the keys, or the nodes of trees: one list for all batch rows or one for
// each of them, with lengths that add up to `length`.
void check_documents(const std::vector<std::vector<int64_t>>& lists, std::string_view name, int64_t length,
                     const AttentionShape& shape) {
  if (lists.size() != 1 && static_cast<int64_t>(lists.size()) != shape.batch) {
    refuse_plan("\"" + std::string(name) + "\" needs one list for all batch rows or one for each of the " +
                str(shape.batch) + ", got " + std::to_string(lists.size()));
  }
  for (size_t row = 0; row < lists.size(); ++row) {
    int64_t sum = 0;
    for (const int64_t n : lists[row]) sum += n;
    if (sum == length) continue;
    refuse_plan("\"" + std::string(name) + "\" of batch row " + std::to_string(row) + " must add up to the " +
                counted(length, name == "key_documents" ? "key" : "query") + ", but add up to " + str(sum));
  }
}

void check_documents(const PatternSpec& spec, const AttentionShape& shape) {
  if (spec.documents.empty()) return;
  check_documents(spec.documents, "documents", shape.q_len, shape);
  if (spec.key_documents.empty()) {
    if (shape.q_len != shape.k_len) {
      refuse_plan("\"documents\" for " + counted(shape.q_len, "query") + " and " + counted(shape.k_len, "key") +
                  " need \"key_documents\", the lengths of the keys' documents");
    }
    return;
  }
  check_documents(spec.key_documents, "key_documents", shape.k_len, shape);
  for (size_t row = 0; row < std::max(spec.documents.size(), spec.key_documents.size()); ++row) {
    const size_t queries = spec.documents[spec.documents.size() == 1 ? 0 : row].size();
    const size_t keys = spec.key_documents[spec.key_documents.size() == 1 ? 0 : row].size();
    if (queries != keys) {
      refuse_plan("batch row " + std::to_string(row) + " has " + counted(static_cast<int64_t>(queries), "document") +
                  " of queries and " + std::to_string(keys) +
                  " of keys: there must be as many of both, because the n-th document of the queries sees the n-th of "
                  "the keys; a length may be 0");
    }
  }
}

void check_kept_keys(const PatternSpec& spec, const AttentionShape& shape) {
  const auto& rows = spec.kept_keys;
  if (!rows.empty() && rows.size() != 1 && static_cast<int64_t>(rows.size()) != shape.batch) {
    refuse_plan("\"kept_keys\" needs one list for all batch rows or one for each of the " + str(shape.batch) +
                ", got " + std::to_string(rows.size()));
  }
  for (const std::vector<Span>& row : rows) {
    if (row.empty() || row.back().last() < shape.k_len) continue;
    refuse_plan("\"kept_keys\" has keys up to " + str(row.back().last()) + ", but there are only " +
                counted(shape.k_len, "key"));
  }
}

void check_mask(const PatternSpec& spec, const AttentionShape& shape) {
  if (!spec.mask.given) return;
  const TokenMask& mask = *spec.mask.given;
  if ((mask.batch != 1 && mask.batch != shape.batch) || (mask.heads != 1 && mask.heads != shape.heads) ||
      mask.queries != shape.q_len || mask.keys != shape.k_len) {
    refuse_plan("the mask has the shape " + list_text(std::vector{mask.batch, mask.heads, mask.queries, mask.keys}) +
                "; for [batch or 1, heads or 1, queries, keys] expected " +
                block_map_shapes(shape.batch, shape.heads, shape.q_len, shape.k_len));
  }
  // Masks are compared by their digests.
  if (spec.mask.digest != mask.digest) {
    refuse_plan("the mask has the digest " + mask.digest + ", but its pattern demands " +
                (spec.mask.digest.empty() ? "none; use given_mask" : spec.mask.digest));
  }
  if (ends_with_query(spec) && mask.nearest > shape.query_offset && mask.farthest >= mask.nearest) {
    refuse_plan("the mask shows only keys after their queries, and the pattern is causal, so no query would see a key");
  }
}

void check_given(const BlockMap& map, const BlocksSpec& spec, const AttentionShape& shape) {
  const int64_t query_blocks = ceil_div(shape.q_len, spec.block), key_blocks = ceil_div(shape.k_len, spec.block);
  if (map.block != spec.block || (map.batch != 1 && map.batch != shape.batch) ||
      (map.heads != 1 && map.heads != shape.heads) || map.query_blocks != query_blocks ||
      map.key_blocks != key_blocks) {
    refuse_plan("the block map has blocks of " + str(map.block) + " and the shape [" + str(map.batch) + ", " +
                str(map.heads) + ", " + str(map.query_blocks) + ", " + str(map.key_blocks) + "]; expected blocks of " +
                str(spec.block) + " and " + block_map_shapes(shape.batch, shape.heads, query_blocks, key_blocks));
  }
  // The product is taken in floating point because the numbers of batch rows and heads of a map are not limited.
  const double expected =
      static_cast<double>(map.batch) * static_cast<double>(map.heads) * static_cast<double>(map.query_blocks);
  const size_t rows = map.offsets.empty() ? 0 : map.offsets.size() - 1;
  bool sound = !map.offsets.empty() && static_cast<double>(rows) == expected && map.offsets.front() == 0 &&
               map.offsets.back() == static_cast<int64_t>(map.runs.size());
  for (size_t row = 0; sound && row < rows; ++row) {
    sound = map.offsets[row] <= map.offsets[row + 1] && map.offsets[row + 1] <= map.offsets.back();
    int64_t past = -1;
    for (int64_t r = map.offsets[row]; sound && r < map.offsets[row + 1]; ++r) {
      const BlockRun& run = map.runs[static_cast<size_t>(r)];
      sound = run.begin > past && run.begin < run.end && run.end <= key_blocks;
      past = run.end;
    }
  }
  if (!sound) refuse_plan("the runs of the block map must be ascending, apart from each other and within its blocks");
}

void check_blocks(const BlocksSpec& spec, const AttentionShape& shape) {
  using Map = BlocksSpec::Map;
  if (spec.map == Map::kGiven || spec.map == Map::kFile) {
    if (spec.given) check_given(*spec.given, spec, shape);
    if (spec.given && spec.digest.empty()) {
      refuse_plan("a block map made by a program has no digest; use given_map, which sets the map and its digest");
    }
    if (!spec.given && spec.map == Map::kGiven) refuse_plan("map \"given\" has no block map; use given_map");
    return;
  }
  if (shape.query_offset % spec.block != 0) {
    refuse_plan("map \"" + std::string(kMapNames[static_cast<size_t>(spec.map)]) + "\" with blocks of " +
                str(spec.block) + " needs a query offset that is a multiple of them, got " + str(shape.query_offset));
  }
}

void check_slices(const PatternSpec& spec, const AttentionShape& shape) {
  const auto within = [](const Span& span, int64_t length, std::string_view name) {
    // The sum needs 128 bits: begin is at most 2^40, and (count - 1) * stride is below 2^80.
    if (span.empty() || span.begin + __int128{span.count - 1} * span.stride < length) return;
    refuse_plan("a slice has " + std::string(name) + " from " + str(span.begin) + " in steps of " + str(span.stride) +
                ", " + str(span.count) + " of them, but there are only " + str(length));
  };
  for (const Slice& s : spec.slices) {
    within(s.queries, shape.q_len, "queries");
    within(s.keys, shape.k_len, "keys");
    // A slice may leave out heads and batch rows, which means all of them; pattern.cc then cuts kEverything to the
    // shape.
    if (s.heads != kEverything) within(s.heads, shape.heads, "heads");
    if (s.batch != kEverything) within(s.batch, shape.batch, "batch rows");
  }
}

void check_tree(const TreeSpec& tree, const AttentionShape& shape) {
  if (shape.q_len != shape.k_len || shape.query_offset != 0) {
    refuse_plan("a tree has its queries as keys, so there must be as many keys as queries and no query offset; got " +
                counted(shape.q_len, "query") + ", " + counted(shape.k_len, "key") + " and the offset " +
                str(shape.query_offset));
  }
  check_documents(tree.lengths, "lengths", shape.q_len, shape);
}

void check_shape(const PatternSpec& spec, const AttentionShape& shape) {
  check_documents(spec, shape);
  check_kept_keys(spec, shape);
  check_mask(spec, shape);
  for (const PatternSpec& member : spec.members) check_shape(member, shape);
  if (spec.kind == PatternSpec::Kind::kBlocks) check_blocks(spec.blocks, shape);
  if (spec.kind == PatternSpec::Kind::kTree) check_tree(spec.tree, shape);
  if (spec.kind == PatternSpec::Kind::kSlices) check_slices(spec, shape);
  if (spec.kind != PatternSpec::Kind::kDilated) return;
  const int64_t branches = static_cast<int64_t>(spec.dilated.segment_lengths.size());
  if (spec.dilated.combine == DilatedSpec::Combine::kMean && branches > shape.heads) {
    refuse_plan("combine = \"mean\" gives each branch a group of heads: " + counted(shape.heads, "head") +
                " cannot be split into " + counted(branches, "group") + "; use at most " +
                counted(shape.heads, "branch") + ", or combine = \"lse\"");
  }
}

}  // namespace

void refuse_plan(const std::string& message) { throw Error(ErrorKind::kPlan, "pattern", message); }

std::string fault_of(const PatternSpec& spec) { return fault_of(spec, 0); }

void validate(const AttentionShape& s) {
  if (s.batch < 0 || s.q_len < 0 || s.k_len < 0 || s.heads < 1 || s.kv_heads < 1) {
    refuse_plan("expected batch and lengths of at least 0 and heads of at least 1, got batch " + str(s.batch) + ", " +
                counted(s.q_len, "query") + ", " + counted(s.k_len, "key") + ", " + counted(s.heads, "query head") +
                ", " + counted(s.kv_heads, "kv head"));
  }
  if (s.heads % s.kv_heads != 0) {
    refuse_plan(counted(s.heads, "query head") + " cannot share " + counted(s.kv_heads, "kv head") +
                ": the query heads must be a multiple of the kv heads");
  }
  if (s.q_len > kLongest || s.k_len > kLongest || s.query_offset > kLongest || s.query_offset < -kLongest) {
    refuse_plan("lengths and the query offset must be at most 2^40, got " + counted(s.q_len, "query") + ", " +
                counted(s.k_len, "key") + " and the offset " + str(s.query_offset));
  }
  constexpr int64_t kMostHeads = int64_t{1} << 24;
  if (s.batch > kMostHeads || s.heads > kMostHeads) {
    refuse_plan("batch rows and heads must be at most 2^24, got " + counted(s.batch, "batch row") + " and " +
                counted(s.heads, "query head"));
  }
  if (__int128{s.batch} * s.heads * std::max(s.q_len, s.k_len) > std::numeric_limits<int64_t>::max()) {
    refuse_plan(counted(s.batch, "batch row") + " x " + counted(s.heads, "query head") + " x " +
                str(std::max(s.q_len, s.k_len)) + " positions are more than 2^63 rows");
  }
}

void validate(const PatternSpec& spec, const AttentionShape& shape) {
  validate(shape);
  if (const std::string fault = fault_of(spec); !fault.empty()) refuse_plan(fault);
  check_shape(spec, shape);
  require_size(spec, shape);
}

}  // namespace annulus
