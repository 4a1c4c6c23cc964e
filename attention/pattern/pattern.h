// Pattern: which (query, key) pairs are counted, per batch row and head, with no word about ranks. A pattern is a sum
// of slices. Plans are made from it, the verifier proves plans against it.
//
// PatternSpec is what a user writes (TOML, docs/user-guide.md): { kind = "causal" }. A new kind of attention is a new
// generator of slices in pattern.cc and touches nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/pattern/span.h"

namespace annulus {

// The problem a pattern is made for. Query i has the position i + query_offset, key j the position j.
struct AttentionShape {
  int64_t batch = 1;
  int64_t heads = 1;     // query heads H
  int64_t kv_heads = 1;  // Hk; query head h reads kv head h / (H / Hk)
  int64_t q_len = 0;     // Sq
  int64_t k_len = 0;     // Sk
  int64_t query_offset = 0;

  friend bool operator==(const AttentionShape&, const AttentionShape&) = default;
};

// Raises Error(kPlan) when sizes are negative, heads are no multiple of kv_heads, or lengths are beyond 2^40.
void validate(const AttentionShape& shape);

// Dilated attention (LongNet, arXiv 2307.02486, section 3): branch i cuts the sequence into segments of
// segment_lengths[i] and keeps, of each segment, the positions congruent to a head's offset modulo dilation_rates[i].
struct DilatedSpec {
  enum class Offsets {
    kModulo,  // head h: h mod rate
    kGroups,  // floor(h / ceil(H / rate))
  };
  enum class Combine {
    kLse,   // every head in every branch, weighted by the softmax denominators (the paper's equation 10)
    kMean,  // heads in as many contiguous groups as branches, one branch each; output_divisor() divides the output
  };
  std::vector<int64_t> segment_lengths;  // tokens; longer than the sequence acts as the sequence
  std::vector<int64_t> dilation_rates;   // as many
  Offsets offsets = Offsets::kModulo;
  Combine combine = Combine::kLse;
  bool equal_segments = false;  // the length must be a multiple of ranks * max(segment_lengths)

  friend bool operator==(const DilatedSpec&, const DilatedSpec&) = default;
};

// Block-sparse attention; docs/attention.md defines each map.
struct BlocksSpec {
  enum class Map {
    kLocal,         // window
    kDilated,       // window, rate
    kGlobalLocal,   // global, window
    kBigBird,       // window, global, random, seed
    kStrided,       // window, stride
    kHierarchical,  // levels
    kAdaptive,      // keep, query; selected from q and k at each call (execution/select_blocks.h)
    kFile,          // file, digest; read by whoever starts the job (tensor_files/block_map_file.h)
    kGiven,         // made by a program
  };
  enum class Query { kMean, kFirst };  // what of a query block adaptive selection compares: its mean, its first query
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
  int64_t keep = 1;  // key blocks for each query block, its own one included
  Query query = Query::kMean;
  bool per_head = true;  // bigbird: random blocks drawn for each head; false: head 0's for all of them
  std::string file;
  std::string digest;                     // of the file's map, if it must be this one; of `given`
  std::shared_ptr<const BlockMap> given;  // kGiven, and kFile once it was read
};

// A map made by a program, and the digest that texts, caches and ranks know it by: hashed here, once.
BlocksSpec given_map(std::shared_ptr<const BlockMap> map);

// What the user wrote, checked. Equal texts mean equal patterns: `text` is the canonical form and part of plan keys.
struct PatternSpec {
  enum class Kind { kFull, kWindow, kDilated, kBlocks, kUnion, kSlices };
  Kind kind = Kind::kFull;
  bool causal = false;  // restricts any kind to key position <= query position; "causal" is full and causal
  int64_t left = 0;     // window: keys from query - left
  int64_t right = 0;    //         to query + right, both inclusive
  DilatedSpec dilated;
  BlocksSpec blocks;
  std::vector<PatternSpec> members;  // union: counts are added
  std::vector<Slice> slices;         // slices: as they are; for patterns made by programs and in reproductions
  // Packed sequences: lengths of the documents of each batch row, or one list for all rows; empty: no documents. They
  // restrict any kind to pairs of one document. "documents" is full with documents.
  std::vector<std::vector<int64_t>> documents;
  std::vector<std::vector<int64_t>> key_documents;  // of the keys where they differ (cross-attention); else empty

  // TOML that parse_pattern reads to an equal spec, but for block maps made by a program, which it names by digest.
  std::string text() const;
  int64_t bytes() const;  // of memory, block maps included
  friend bool operator==(const PatternSpec& a, const PatternSpec& b) { return a.text() == b.text(); }
};

inline PatternSpec causal_pattern() {
  PatternSpec spec;
  spec.causal = true;
  return spec;
}

// What the output of attention is divided by: the number of head groups where branches combine by mean, else 1.
int64_t output_divisor(const PatternSpec& spec);

// Some part of it is selected from q and k (an adaptive block map): it has no slices before that.
bool is_adaptive(const PatternSpec& spec);

// Reads an inline TOML table such as `{ kind = "window", left = 1023, right = 0 }`. `where` names the place in messages
// ("--pattern", "model.pattern"). Raises Error(kUsage): not TOML, unknown kind or key (the nearest one is named), a key
// of the wrong type, and whatever cannot be for any shape (a negative reach, rates not matching segments, ...).
PatternSpec parse_pattern(std::string_view toml, std::string_view where);

// Raises Error(kPlan) where the pattern cannot be for this shape, as make_pattern does and before any memory is taken;
// maps that are still to be selected or read pass.
void validate(const PatternSpec& spec, const AttentionShape& shape);

// The pattern with the `causal` of a union said of each of its members, too: what a member draws or selects depends on
// it. What patterns are made from and selected for is this.
PatternSpec with_causal_members(PatternSpec spec);

// Of batch rows first, ..., first + count - 1 alone, as rows 0, 1, ...: what is listed for each row (documents, maps
// given or read, slices) is cut to these, at least one. The pattern is valid for a batch that has them.
PatternSpec of_batch_rows(PatternSpec spec, int64_t first, int64_t count);

// A sum of slices over a shape; pairs are counted as often as slices contain them.
struct Pattern {
  AttentionShape shape;
  std::vector<Slice> slices;
};

// Raises Error(kPlan) where the pattern cannot be for this shape: documents that do not add up, Sq != Sk for a kind
// that knows no cross-attention, a block map of another shape, more branches than heads, an adaptive or unread map.
Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape);

// The active blocks of a pattern of kind blocks (not of members of a union): what its slices were made from, future
// blocks left out where causal. Raises as make_pattern does, and for another kind.
BlockMap make_block_map(const PatternSpec& spec, const AttentionShape& shape);

// Whether some query may see a key at a later position than its own. A map that is still to be selected or read counts
// as having every block. Raises as make_pattern does otherwise. For whoever trains a model that is to write text.
bool sees_later(const PatternSpec& spec, const AttentionShape& shape);

// Counted pairs of all batch rows and heads: 4 D of them are the multiply-adds, twice, of a forward.
int64_t count_pairs(const Pattern& pattern);

}  // namespace annulus
