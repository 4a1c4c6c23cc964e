// `annulus bench operator`: the cost of torch.ops.annulus.attention compared with the C++ call that it makes, forward
// and backward. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct OperatorBenchOptions {
  std::vector<int64_t> lengths = {512, 8192};
  int64_t heads = 8, head_dim = 64;
  double seconds = 10;  // wall seconds for each length, both sides together
};

// Runs on one rank and one thread, causal, in fp32, with calls of both sides in turn. The operator is called as Python
// calls it, by its schema with boxed arguments; the time of Python's interpreter is not measured. Prints a table and,
// as its last line, the same numbers as one JSON object.
std::vector<BenchRatio> run_operator_bench(const OperatorBenchOptions& options, std::ostream& out);

}  // namespace annulus
