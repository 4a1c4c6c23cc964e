// `annulus bench train`: tokens trained for each CPU second on one rank, and the share of CPU time spent outside matrix
// products and attention. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct TrainBenchOptions {
  int64_t layers = 4, dim = 256, heads = 4, kv_heads = 2, ffn = 688;  // a Llama of 3M parameters over bytes
  int64_t context = 1024, batch = 4;
  int64_t steps = 5;  // steps that count; one more runs first
  int threads = 1;
  // A shell command that measures the same training in another program, such as eager PyTorch. The last line of its
  // output is a JSON object with "cpu_s_per_1k_tok". It runs after annulus's steps. Empty: no baseline.
  std::string baseline;
};

// Runs on one rank, without a launcher. Prints a table and, as its last line, the same numbers as one JSON object.
// Raises Error(kUnavailable) if the baseline fails.
std::vector<BenchRatio> run_train_bench(const TrainBenchOptions& options, std::ostream& out);

}  // namespace annulus
