// `annulus bench ring`: what distribution costs. The whole ring's CPU seconds over those of one process that does the
// same work with LibTorch's flash attention, side by side in one run. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "attention/plan/plan.h"
#include "benchmarks/report/report.h"
#include "comm/communicator.h"

namespace annulus {

struct RingBenchOptions {
  PlanRequest request;  // ranks is set by the benchmark
  int64_t head_dim = 64;
  int64_t repeats = 5;
};

// Collective over `world`. Measures 2 ranks and 4 ranks where the world has them, and one process alone, in turn,
// `repeats` times; rank 0 prints the table to `out` and gets the ratios, other ranks none.
std::vector<BenchRatio> run_ring_bench(const RingBenchOptions& options, Communicator& world, std::ostream& out);

}  // namespace annulus
