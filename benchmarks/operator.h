// `annulus bench operator`: what torch.ops.annulus.attention costs over the C++ call that it makes, forward and
// backward. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct OperatorBenchOptions {
  std::vector<int64_t> lengths = {512, 8192};
  int64_t heads = 8, head_dim = 64;
  double seconds = 10;  // for each length, both sides together
};

// One rank, one thread, causal, fp32. The operator is called as Python calls it, by its schema with boxed arguments;
// what Python's own interpreter takes is not measured. Calls of both sides in turn. Prints a table, and as its last
// line the same as one JSON object.
std::vector<BenchRatio> run_operator_bench(const OperatorBenchOptions& options, std::ostream& out);

}  // namespace annulus
