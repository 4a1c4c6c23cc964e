// Pattern: which (query, key) pairs are counted for each batch row and head, independently of ranks. A pattern is a sum
// of slices. The planner (attention/plan) makes plans from it; the verifier (attention/proof) proves them against it.
//
// PatternSpec is what a user writes as a TOML table (docs/explanation/attention.md), such as { kind = "causal" }. A new
// kind of attention needs a generator of slices in this package, its parsing and formatting (parse.cc, text.cc) and its
// definition in the oracle; planner, executor and kernels do not change. All functions here are thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/pattern/span.h"
#include "attention/pattern/token_mask.h"

namespace annulus {

// The problem sizes of a pattern. Query i has position i + query_offset, key j position j.
struct AttentionShape {
  int64_t batch = 1;
  int64_t heads = 1;     // query heads H
  int64_t kv_heads = 1;  // Hk; query head h reads kv head h / (H / Hk)
  int64_t q_len = 0;     // Sq
  int64_t k_len = 0;     // Sk
  int64_t query_offset = 0;

  uint64_t hash() const;  // equal shapes have equal hashes
  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

// The query offset k_len - q_len, by which the last query has the position of the last key, where the lengths are not
// known yet. aligned() replaces it; other functions take a shape only without it.
constexpr int64_t kBottomRight = -(int64_t{1} << 60);

// Parses a query offset: a whole number, "bottom-right" (kBottomRight) or "top-left" (0). `where` names the source in
// messages ("--query-offset"). Raises Error(kUsage).
int64_t parse_query_offset(std::string_view text, std::string_view where);

// Returns the shape with the number that its query offset kBottomRight, if it has that, stands for.
AttentionShape aligned(AttentionShape shape);

// Raises Error(kPlan) if a size is negative, heads is not a multiple of kv_heads, a length exceeds 2^40, batch or heads
// exceeds 2^24, or batch * heads * length overflows 64 bits.
void validate(const AttentionShape& shape);

// Dilated attention (LongNet, arXiv 2307.02486, section 3): branch i cuts the sequence into segments of
// segment_lengths[i] and keeps, of each segment, the positions congruent to a head's offset modulo dilation_rates[i].
struct DilatedSpec {
  enum class Offsets {
    kModulo,  // head h: h mod rate
    kGroups,  // head h: floor(h / ceil(H / rate))
  };
  enum class Combine {
    kLse,   // every head computes every branch; branches are weighted by their softmax denominators (equation 10)
    kMean,  // each branch has a contiguous group of heads; the output is divided by output_divisor()
  };
  std::vector<int64_t> segment_lengths;  // tokens; a longer segment than the sequence is the whole sequence
  std::vector<int64_t> dilation_rates;   // one for each segment length
  Offsets offsets = Offsets::kModulo;
  Combine combine = Combine::kLse;
  bool equal_segments = false;  // the length must be a multiple of ranks * max(segment_lengths)

  friend bool operator==(const DilatedSpec&, const DilatedSpec&) = default;
};

// A block map of a pattern. The digest beside it says which map it is, so pointers are all equal in comparisons.
struct MapPointer : std::shared_ptr<const BlockMap> {
  using shared_ptr::shared_ptr;
  MapPointer(std::shared_ptr<const BlockMap> map) : shared_ptr(std::move(map)) {}
  friend bool operator==(const MapPointer&, const MapPointer&) { return true; }
};

// A mask of tokens, likewise. Masks that hold the bits of different queries differ, because slices of one cannot serve
// for the other.
struct TokenMaskPointer : std::shared_ptr<const TokenMask> {
  using shared_ptr::shared_ptr;
  TokenMaskPointer(std::shared_ptr<const TokenMask> mask) : shared_ptr(std::move(mask)) {}
  friend bool operator==(const TokenMaskPointer& a, const TokenMaskPointer& b) {
    return !a == !b && (!a || a->held == b->held);
  }
};

// Which mask of tokens restricts a pattern.
struct MaskSpec {
  std::string file;    // of the mask, [batch or 1, heads or 1, queries, keys] (runtime/tensor_files/block_map_file.h)
  std::string digest;  // of `given`; before a file is read, the expected digest, or empty
  TokenMaskPointer given;  // null: not read yet, or a mask that a program knows by its digest

  bool empty() const { return file.empty() && digest.empty() && !given; }
  friend bool operator==(const MaskSpec&, const MaskSpec&) = default;
};

// Returns the spec of a mask made by a program.
MaskSpec given_mask(std::shared_ptr<const TokenMask> mask);

// Block-sparse attention; docs/explanation/attention.md defines each map.
struct BlocksSpec {
  enum class Map {
    kLocal,         // uses window_blocks
    kDilated,       // uses window_blocks, rate
    kGlobalLocal,   // uses global_blocks, window_blocks
    kBigBird,       // uses window_blocks, global_blocks, random_blocks, seed, per_head
    kStrided,       // uses window_blocks, stride
    kHierarchical,  // uses levels
    kAdaptive,      // uses keep, query; selected from q and k at each call (attention/execution/select_blocks.h)
    kFile,          // uses file, digest; loaded before planning (runtime/tensor_files/block_map_file.h)
    kGiven,         // uses given, a map made by a program
  };
  enum class Query { kMean, kFirst };  // what represents a query block in adaptive selection
  struct Level {
    int64_t stride = 1, reach = 0;  // blocks
    friend bool operator==(const Level&, const Level&) = default;
  };
  Map map = Map::kLocal;
  int64_t block = 128;        // tokens; a multiple of 16
  int64_t window_blocks = 0;  // abs(query block - key block) <= window_blocks
  int64_t rate = 1;
  int64_t global_blocks = 0;
  int64_t random_blocks = 0;
  int64_t seed = 0;
  int64_t stride = 1;
  std::vector<Level> levels;
  int64_t keep = 1;  // key blocks per query block, its own included
  Query query = Query::kMean;
  bool per_head = true;  // bigbird: each head draws its own random blocks; false: all heads use those of head 0
  std::string file;
  std::string digest;  // of `given`; for kFile the expected digest of the file's map, or empty
  MapPointer given;    // the map of kGiven, or of kFile once loaded

  friend bool operator==(const BlocksSpec&, const BlocksSpec&) = default;
};

// Returns the spec of a map made by a program, and computes the digest by which texts, caches and ranks identify it.
BlocksSpec given_map(std::shared_ptr<const BlockMap> map);

// Prefix trees: a row of the batch holds the nodes of one or more trees in depth-first order, and a token sees those
// before it on the path from its root (docs/explanation/attention.md). rollouts.h makes trees, positions and targets.
struct TreeSpec {
  std::vector<std::vector<int64_t>> lengths;  // tokens of each node: one list for all batch rows or one for each
  std::vector<std::vector<int64_t>> parents;  // of each node its parent's index in the list; -1: a root

  friend bool operator==(const TreeSpec&, const TreeSpec&) = default;
};

// A pattern as the user wrote it. text() is its canonical form, which ranks compare by its digest: equal patterns have
// equal texts, and patterns with equal texts count the same pairs.
struct PatternSpec {
  enum class Kind { kFull, kWindow, kDilated, kBlocks, kTree, kUnion, kSlices };
  static constexpr int64_t kOpen = -1;  // an unbounded side of a window, as in other libraries
  Kind kind = Kind::kFull;
  bool causal = false;  // restricts any kind to key position <= query position; kind "causal" is kFull with `causal`
  int64_t left = 0;     // window: keys from query - left, with kOpen from the first
  int64_t right = 0;    //         to query + right, with kOpen to the last; both inclusive
  int64_t sink_tokens = 0;  // window: the first keys of the row, or of the document, which queries see as well
  DilatedSpec dilated;
  BlocksSpec blocks;
  TreeSpec tree;
  std::vector<PatternSpec> members;  // union: counts are added
  std::vector<Slice> slices;         // slices, unchanged: for programs and to reproduce failures
  // Packed sequences: the document lengths of each batch row, or one list for all rows; empty: no documents. They
  // restrict any kind to pairs within one document. Kind "documents" is kFull with `documents`.
  std::vector<std::vector<int64_t>> documents;
  std::vector<std::vector<int64_t>> key_documents;  // of the keys if they differ (cross-attention)
  // The keys that are no padding: ranges of stride 1, ascending and apart from each other, of each batch row, or one
  // list for all rows; empty: all keys. They restrict any kind, as `mask` does.
  std::vector<std::vector<Span>> kept_keys;
  MaskSpec mask;

  // Returns TOML that parse_pattern parses into an equal spec. A block map made by a program is written as its digest
  // and cannot be parsed back.
  std::string text() const;
  // Of memory. Without `maps` the block maps do not count, which are shared with whoever else has the pattern.
  int64_t bytes(bool maps = true) const;
  uint64_t hash() const;  // equal patterns have equal hashes
  friend bool operator==(const PatternSpec&, const PatternSpec&) = default;
};

inline PatternSpec causal_pattern() {
  PatternSpec spec;
  spec.causal = true;
  return spec;
}

// Returns the divisor of attention's output: the number of branches with Combine::kMean, else 1.
int64_t output_divisor(const PatternSpec& spec);

// Returns whether the pattern contains an adaptive block map, which has no slices until it is selected from q and k.
bool is_adaptive(const PatternSpec& spec);

// Returns whether a mask of tokens restricts the pattern or a part of it.
bool has_mask(const PatternSpec& spec);

// Parses an inline TOML table such as `{ kind = "window", left = 1023, right = 0 }`. `where` names the source in
// messages ("--pattern", "model.pattern"). Raises Error(kUsage) if the text is not TOML, a kind or key is unknown (the
// message suggests the nearest), a value has the wrong type, or the pattern is invalid for every shape (a window bound
// below -1, numbers of rates and segments that differ, ...).
PatternSpec parse_pattern(std::string_view toml, std::string_view where);

// Returns the kinds that it takes, for --help: "full, causal, window, ... or slices".
std::string pattern_kinds();

// Raises Error(kPlan) if the pattern is invalid for this shape, as make_pattern does, but without allocating memory.
// Accepts maps that are not yet selected or loaded.
void validate(const PatternSpec& spec, const AttentionShape& shape);

// Returns the pattern with `causal` set in the members of each causal union, because the random draws and the
// selections of a member depend on it. Used by make_pattern and the selection of blocks.
PatternSpec with_causal_members(PatternSpec spec);

// Returns the pattern restricted to the batch rows first, ..., first + count - 1, renumbered from 0; count >= 1.
// Per-row data (documents, given or loaded maps, slices) are cut to these rows. The pattern must be valid for a batch
// with these rows.
PatternSpec of_batch_rows(PatternSpec spec, int64_t first, int64_t count);

// A sum of slices over a shape. A pair is counted once for each slice that contains it.
struct Pattern {
  AttentionShape shape;
  std::vector<Slice> slices;
  MaskPlanes masks = {};  // to which slices refer
};

// Makes the slices. Raises Error(kPlan) if the pattern is invalid for this shape: documents that do not sum to the
// lengths, a tree with Sq != Sk, a block map of another shape, more branches than heads with combine = "mean", too many
// slices, a map or a mask that is not yet selected or loaded, or a mask or kept keys that leave no query a key.
Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape);

// Returns the active blocks of a pattern of kind blocks, without future blocks if it is causal. Raises the errors of
// make_pattern, and Error(kPlan) for another kind (unions included).
BlockMap make_block_map(const PatternSpec& spec, const AttentionShape& shape);

// Returns whether some query attends to a later position than its own; a model that generates text must not be trained
// with such a pattern. A map or mask that is not yet selected or loaded counts as dense. Otherwise raises the errors of
// make_pattern.
bool sees_later(const PatternSpec& spec, const AttentionShape& shape);

// Returns the number of counted pairs over all batch rows and heads. Raises Error(kPlan) if a mask does not hold the
// bits of all queries. A forward costs 4 D FLOPs per pair: D multiplications and D additions in each of its two matrix
// products.
int64_t count_pairs(const Pattern& pattern);

}  // namespace annulus
