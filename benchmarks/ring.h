// `annulus bench ring`: what distribution costs. It compares the CPU seconds of all ranks of a ring with those of one
// process that does the same work, in turn within one run. One process uses annulus on one rank and, for causal and
// full attention, also LibTorch's flash attention; the faster one is the baseline. Called by program/bench_verb.cc.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "attention/plan/plan.h"
#include "benchmarks/report/report.h"
#include "comm/communicator.h"

namespace annulus {

struct RingBenchOptions {
  PlanRequest request;  // the benchmark sets `ranks`
  int64_t head_dim = 64;
  int64_t repeats = 5;  // turns that count; one more runs first
};

// Collective over `world`. Measures rings of 2 and 4 ranks (as far as the world has them) and one process alone in
// turn, in fp32 with one thread for each rank. Rank 0 prints a table to `out` and returns the ratios; other ranks
// return none. Raises Error(kPlan) if the world has one rank.
std::vector<BenchRatio> run_ring_bench(const RingBenchOptions& options, Communicator& world, std::ostream& out);

}  // namespace annulus
