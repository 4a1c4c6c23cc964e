// Pattern: which (query, key) pairs are counted for each batch row and head, independently of ranks. A pattern is a sum
// of slices. The planner makes plans from it, and the verifier proves plans against it (attention/plan).
//
// PatternSpec is what a user writes as a TOML table (docs/attention.md), such as { kind = "causal" }. A new kind of
// attention needs a generator of slices in this package, its reading and writing (parse.cc, text.cc) and its definition
// in the oracle; planner, executor and kernels stay as they are. All functions here are thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/pattern/span.h"

namespace annulus {

// The sizes of the problem that a pattern is made for. Query i has the position i + query_offset, key j the position j.
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

// Raises Error(kPlan) if a size is negative, heads is not a multiple of kv_heads, a length exceeds 2^40, batch or heads
// exceeds 2^24, or batch * heads * length does not fit 64 bits.
void validate(const AttentionShape& shape);

// Dilated attention (LongNet, arXiv 2307.02486, section 3): branch i cuts the sequence into segments of
// segment_lengths[i] and keeps, of each segment, the positions congruent to a head's offset modulo dilation_rates[i].
struct DilatedSpec {
  enum class Offsets {
    kModulo,  // head h: h mod rate
    kGroups,  // floor(h / ceil(H / rate))
  };
  enum class Combine {
    kLse,   // every head computes every branch, weighted by the softmax denominators (the paper's equation 10)
    kMean,  // one contiguous group of heads for each branch; the output is divided by output_divisor()
  };
  std::vector<int64_t> segment_lengths;  // tokens; a segment longer than the sequence acts as the whole sequence
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

// Block-sparse attention; docs/attention.md defines each map.
struct BlocksSpec {
  enum class Map {
    kLocal,         // uses window_blocks
    kDilated,       // uses window_blocks, rate
    kGlobalLocal,   // uses global_blocks, window_blocks
    kBigBird,       // uses window_blocks, global_blocks, random_blocks, seed, per_head
    kStrided,       // uses window_blocks, stride
    kHierarchical,  // uses levels
    kAdaptive,      // uses keep, query; selected from q and k at each call (attention/execution/select_blocks.h)
    kFile,          // uses file, digest; read before planning (runtime/tensor_files/block_map_file.h)
    kGiven,         // made by a program
  };
  enum class Query { kMean, kFirst };  // adaptive selection compares the mean or the first query of a query block
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
  int64_t keep = 1;  // key blocks for each query block, including its own
  Query query = Query::kMean;
  bool per_head = true;  // bigbird: each head draws random blocks of its own; false: all heads share those of head 0
  std::string file;
  std::string digest;  // of `given`; for kFile the one that the file's map must have, or empty
  MapPointer given;    // the map of kGiven, and of kFile after it has been read

  friend bool operator==(const BlocksSpec&, const BlocksSpec&) = default;
};

// The spec of a map made by a program. Texts, caches and ranks identify the map by its digest, which is computed here.
BlocksSpec given_map(std::shared_ptr<const BlockMap> map);

// A pattern as the user wrote it. text() is its canonical form, which ranks compare by its digest: equal patterns have
// equal texts, and patterns with equal texts count the same pairs.
struct PatternSpec {
  enum class Kind { kFull, kWindow, kDilated, kBlocks, kUnion, kSlices };
  static constexpr int64_t kOpen = -1;  // a side of a window without a bound, as other libraries write it
  Kind kind = Kind::kFull;
  bool causal = false;  // restricts any kind to key position <= query position; kind "causal" is kFull with this
  int64_t left = 0;     // window: keys from query - left, with kOpen from the first
  int64_t right = 0;    //         to query + right, with kOpen to the last; both inclusive
  DilatedSpec dilated;
  BlocksSpec blocks;
  std::vector<PatternSpec> members;  // union: counts are added
  std::vector<Slice> slices;         // slices: taken as they are; written by programs and to reproduce failures
  // Packed sequences: the lengths of the documents of each batch row, or one list for all rows; empty if there are no
  // documents. They restrict any kind to pairs within one document. Kind "documents" is kFull with these.
  std::vector<std::vector<int64_t>> documents;
  std::vector<std::vector<int64_t>> key_documents;  // the keys' documents if they differ (cross-attention), else empty

  // TOML that parse_pattern reads into an equal spec. A block map made by a program is named by its digest and cannot
  // be read back.
  std::string text() const;
  int64_t bytes() const;  // the memory that it occupies, including block maps
  uint64_t hash() const;  // equal patterns have equal hashes
  friend bool operator==(const PatternSpec&, const PatternSpec&) = default;
};

inline PatternSpec causal_pattern() {
  PatternSpec spec;
  spec.causal = true;
  return spec;
}

// The number that the output of attention is divided by: the number of branches if they combine by mean, else 1.
int64_t output_divisor(const PatternSpec& spec);

// Whether some part of the pattern is selected from q and k (an adaptive block map). It has no slices before that.
bool is_adaptive(const PatternSpec& spec);

// Reads an inline TOML table such as `{ kind = "window", left = 1023, right = 0 }`. `where` names the place in messages
// ("--pattern", "model.pattern"). Raises Error(kUsage) if the text is not TOML, a kind or key is unknown (the message
// names the nearest), a value has the wrong type, or the pattern is invalid for every shape (a reach below -1, a number
// of rates that differs from the number of segments, ...).
PatternSpec parse_pattern(std::string_view toml, std::string_view where);

// Raises Error(kPlan) if the pattern is invalid for this shape, as make_pattern does, but before memory is taken. Maps
// that are yet to be selected or read are accepted.
void validate(const PatternSpec& spec, const AttentionShape& shape);

// The pattern in which the members of each causal union are causal, too, because what a member draws or selects depends
// on it. make_pattern and the selection of blocks use this form.
PatternSpec with_causal_members(PatternSpec spec);

// The pattern of the batch rows first, ..., first + count - 1 alone, which become rows 0, 1, ...; count >= 1. What is
// listed for each row (documents, maps given or read, slices) is cut to these rows. The pattern must be valid for a
// batch that has them.
PatternSpec of_batch_rows(PatternSpec spec, int64_t first, int64_t count);

// A sum of slices over a shape. A pair is counted once for each slice that contains it.
struct Pattern {
  AttentionShape shape;
  std::vector<Slice> slices;
};

// Raises Error(kPlan) if the pattern is invalid for this shape: documents that do not add up to the lengths, Sq != Sk
// for dilated attention, a block map of another shape, more branches than heads with combine = "mean", too many slices,
// or an adaptive or unread map.
Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape);

// The active blocks of a pattern of kind blocks, from which its slices are made; if the pattern is causal, without
// future blocks. Raises the errors of make_pattern, and Error(kPlan) for another kind (unions included).
BlockMap make_block_map(const PatternSpec& spec, const AttentionShape& shape);

// Whether some query may see a key at a later position than its own; a model that is to generate text must not be
// trained with such a pattern. A map that is yet to be selected or read counts as having every block. Otherwise raises
// the errors of make_pattern.
bool sees_later(const PatternSpec& spec, const AttentionShape& shape);

// The number of counted pairs of all batch rows and heads. A forward costs 4 D floating-point operations for each of
// them: D multiplications and D additions in each of its two matrix products.
int64_t count_pairs(const Pattern& pattern);

}  // namespace annulus
