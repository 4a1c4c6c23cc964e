// `annulus bench attention`: compares attention on one core with the core's peak, with LibTorch's operator, and bf16
// with fp32, forward and backward separately, over shapes, masks and dtypes, with the instruction set that this process
// uses (ANNULUS_ISA). Called by program/attention_word.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct AttentionBenchOptions {
  // Every combination of these values is measured; an empty list stands for its usual values. If all are empty, a fixed
  // choice of shapes is measured.
  std::vector<int64_t> lengths, dims;
  std::vector<std::string> masks, dtypes;
  double seconds = 0.5;  // wall seconds to measure each cell for, for each side
};

// The names of the masks: "causal", "full", "window1024", "window256", "grouped" (causal, four query heads for each kv
// head), "dilated", "blocks" (of 128, with density 0.1) and "dropout" (causal, drops a tenth of the pairs).
const std::vector<std::string>& attention_bench_masks();

// Raises Error(kUsage) for an unknown mask or dtype, and Error(kPlan) for a length that does not fit the mask.
void check(const AttentionBenchOptions& options);

// Runs on one rank and one thread, without a launcher. Prints each line of a table as soon as it is measured.
std::vector<BenchRatio> run_attention_bench(const AttentionBenchOptions& options, std::ostream& out);

}  // namespace annulus
