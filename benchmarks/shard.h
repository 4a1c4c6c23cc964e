// `annulus bench shard`: the cost of a training step whose ranks share weights, gradients and optimizer state
// (optimizer.shard of 1 to 3), compared with one in which each rank holds all of them (0). Called by
// program/bench_verb.cc on every rank.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"
#include "comm/communicator.h"

namespace annulus {

// By default a Llama of 11.9M parameters: each layer takes well over 10 ms, forward and backward, on one core, below
// which there is no goal.
struct ShardBenchOptions {
  int64_t layers = 4, dim = 512, heads = 8, kv_heads = 4, ffn = 1376;
  int64_t context = 1024, batch = 1;
  int64_t rounds = 40;  // rounds that count; one step of each level runs first
  std::string dtype = "fp32";
};

// Collective. Measures steps of the levels 0 to 3 in turn, in CPU seconds of all ranks together. Rank 0 prints a table,
// which also shows what each level sends and holds, and as its last line the same numbers as one JSON object. Every
// rank returns the same ratios.
std::vector<BenchRatio> run_shard_bench(const ShardBenchOptions& options, Communicator& world, std::ostream& out);

}  // namespace annulus
