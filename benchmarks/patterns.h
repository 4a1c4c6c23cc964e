// `annulus bench patterns`: whether the cost of attention follows the mask. For each pattern it compares one attention
// call, forward and backward, with the same call without a mask. Used by gpu/attention.cc, attention.cc and seeds/,
// which measure some of the same patterns, and by tests.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "benchmarks/report.h"

namespace annulus {

struct BenchPattern {
  std::string name;
  PatternSpec spec;
  // The cost over the dense call's should be at most this many times the pattern's share of the dense call's pairs.
  std::optional<double> goal_of_share;
};

struct PatternsBenchOptions {
  int64_t length = 16384, heads = 2, head_dim = 64;
  int64_t rounds = 5;                 // rounds that count; one more runs first
  int threads = 1;                    // with more, CPU seconds include the time that threads wait for each other
  std::vector<std::string> patterns;  // TOML; empty: the usual patterns

  AttentionShape shape() const { return {1, heads, heads, length, length, 0}; }
};

// The patterns to measure: those of the options, otherwise the usual ones. Raises Error(kUsage) for an invalid pattern,
// Error(kPlan) for one that does not fit the shape.
std::vector<BenchPattern> bench_patterns(const PatternsBenchOptions& options);

// A block map [1, heads, blocks, blocks] with blocks of `block` positions and this density. The diagonal blocks are
// always active; the others are drawn with a fixed seed, so every call gives the same map. With `heads` 1 all heads
// share it.
BlockMap random_block_map(int64_t block, int64_t heads, int64_t blocks, double density);
// The pattern of such a map over `length` positions.
PatternSpec random_blocks(int64_t block, int64_t heads, int64_t length, double density);

// Runs on one rank, without a launcher. Prints a table.
std::vector<BenchRatio> run_patterns_bench(const PatternsBenchOptions& options, std::ostream& out);

}  // namespace annulus
