// Random patterns for property tests (of patterns, plans, kernels and attention): any kind that a shape can have, with
// causal and documents added as they come. Called within a rapidcheck property.
#pragma once

#include "attention/pattern/pattern.h"

namespace annulus::testing {

// Valid for the shape. Block-sparse kinds have blocks of 16 or 32, so shapes of a few blocks are interesting ones;
// where the shape's query offset is a multiple of 16, such kinds are drawn. None is adaptive or read from a file. Its
// text() reproduces it.
PatternSpec any_pattern(const AttentionShape& shape);

// A map for the shape whose blocks are active as it comes, with batch rows and heads of their own or shared.
BlockMap any_block_map(const AttentionShape& shape, int64_t block);

// Lengths, some of them 0, that add up to `length`.
std::vector<int64_t> any_documents(int64_t length, int64_t count);

}  // namespace annulus::testing
