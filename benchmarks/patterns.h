// `annulus bench patterns`: whether cost follows the mask. One attention call, forward and backward, with each pattern,
// over the same call without a mask. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "benchmarks/report/report.h"

namespace annulus {

struct BenchPattern {
  std::string name;
  PatternSpec spec;
  std::optional<double> goal;           // the cost over the dense one should be at most this,
  std::optional<double> goal_of_share;  // or at most this many times the pattern's share of the dense pairs
};

struct PatternsBenchOptions {
  int64_t length = 16384, heads = 2, head_dim = 64;
  int64_t rounds = 5;                 // counted ones; one more runs first
  int threads = 1;                    // with more, CPU seconds hold what threads wait for each other
  std::vector<std::string> patterns;  // TOML; empty: bench_patterns()

  AttentionShape shape() const { return {1, heads, heads, length, length, 0}; }
};

// What is measured, checked against the shape. Raises Error(kUsage, kPlan).
std::vector<BenchPattern> bench_patterns(const PatternsBenchOptions& options);

// A block map of this density with the own block of each query block always active and the others drawn (seed fixed):
// the same map at every call. `heads` 1: shared by all.
BlockMap random_block_map(int64_t block, int64_t heads, int64_t blocks, double density);

// One rank, no launcher. Prints a table.
std::vector<BenchRatio> run_patterns_bench(const PatternsBenchOptions& options, std::ostream& out);

}  // namespace annulus
