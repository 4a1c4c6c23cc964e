// Pattern: which (query, key) pairs are counted, per batch row and head, with no word about ranks. A pattern is a sum
// of slices. Plans are made from it, the verifier proves plans against it.
//
// PatternSpec is what a user writes (TOML, docs/user-guide.md): { kind = "causal" }. A new kind of attention is a new
// generator of slices in pattern.cc and touches nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

// What the user wrote, checked. Equal texts mean equal patterns: `text` is the canonical form and part of plan keys.
struct PatternSpec {
  enum class Kind { kFull, kWindow };
  Kind kind = Kind::kFull;
  bool causal = false;  // restricts any kind to key position <= query position; "causal" is full and causal
  int64_t left = 0;     // window: keys from query - left
  int64_t right = 0;    //         to query + right, both inclusive

  std::string text() const;
  friend bool operator==(const PatternSpec&, const PatternSpec&) = default;
};

// Reads an inline TOML table such as `{ kind = "window", left = 1023, right = 0 }`. `where` names the place in messages
// ("--pattern", "model.pattern"). Raises Error(kUsage): not TOML, unknown kind or key (the nearest one is named), a key
// of the wrong type, a negative reach.
PatternSpec parse_pattern(std::string_view toml, std::string_view where);

// A sum of slices over a shape; pairs are counted as often as slices contain them.
struct Pattern {
  AttentionShape shape;
  std::vector<Slice> slices;
};

// Raises Error(kPlan) where the pattern cannot be for this shape.
Pattern make_pattern(const PatternSpec& spec, const AttentionShape& shape);

}  // namespace annulus
