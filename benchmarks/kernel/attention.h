// `annulus bench attention`: how close attention on one core comes to what the core can do, and to LibTorch's operator.
// Forward and backward apart, over shapes, masks and dtypes, with the instructions that this process computes with
// (ANNULUS_ISA). Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct AttentionBenchOptions {
  // Every combination of what is named; where one is empty, of its usual values.
  std::vector<int64_t> lengths, dims;
  std::vector<std::string> masks, dtypes;
  double seconds = 0.5;  // to measure for, for each cell and side
};

// The masks that have a name here: "causal", "full", "window1024", "window256", "grouped" (causal, four query heads to
// a kv head), "dilated", "blocks" (of 128, density 0.1), "dropout" (causal, a tenth of the pairs).
const std::vector<std::string>& attention_bench_masks();

// Refuses names that are none, Error(kUsage), and lengths that blocks do not divide, Error(kPlan).
void check(const AttentionBenchOptions& options);

// One rank, one thread, no launcher. Prints a table, line by line as it is measured.
std::vector<BenchRatio> run_attention_bench(const AttentionBenchOptions& options, std::ostream& out);

}  // namespace annulus
