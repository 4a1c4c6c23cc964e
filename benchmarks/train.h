// `annulus bench train`: training throughput per CPU second on one rank, and how much of it is neither matrix products
// nor attention. Called by program/bench_verb.cc.
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
  int64_t steps = 5;  // counted ones; one more runs first
  int threads = 1;
  // A command for the shell that measures the same training elsewhere (eager PyTorch) and whose last line is a JSON
  // object with "cpu_s_per_1k_tok"; run after annulus's steps. Empty: no baseline.
  std::string baseline;
};

// One rank, no launcher. Prints a table and, as its last line, the same as one JSON object. Raises Error(kUnavailable)
// when the baseline fails.
std::vector<BenchRatio> run_train_bench(const TrainBenchOptions& options, std::ostream& out);

}  // namespace annulus
