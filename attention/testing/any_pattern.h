// Random patterns for property tests of patterns, plans, kernels and attention: any kind that a shape can have, causal
// or not, with or without documents. Call these functions within a rapidcheck property.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus::testing {

// Returns a pattern that is valid for the shape. Block-sparse kinds have blocks of 16 or 32 positions, so shapes of a
// few blocks are the interesting ones; such kinds are drawn only if the shape's query offset is a multiple of 16. No
// pattern is adaptive or read from a file. The pattern's text() reproduces it.
PatternSpec any_pattern(const AttentionShape& shape);

// Returns a map for the shape with randomly active blocks. Batch rows and heads have their own planes or share one.
BlockMap any_block_map(const AttentionShape& shape, int64_t block);

// Returns a mask for the shape: of random pairs, a band, keys up to one for each query, all pairs or a single one. It
// shows a pair if the shape has any, and a key that is not after its query if there is one.
TokenMask any_token_mask(const AttentionShape& shape);

// Returns the pattern with a mask of tokens. Where no query has a position of a key that is shown it is not causal.
PatternSpec with_any_mask(PatternSpec pattern, const AttentionShape& shape);

// Returns a union, causal or not, of a window, of a tree if the shape can have one, and of a pattern of another kind,
// one of which has a mask of tokens.
PatternSpec any_masked_union(const AttentionShape& shape);

// Returns lengths, some of them 0, that add up to `length`.
std::vector<int64_t> any_documents(int64_t length, int64_t count);

}  // namespace annulus::testing
