// `annulus bench shard`: what a training step costs where ranks share its state, over one where each holds all of it.
// Called by program/bench_verb.cc on every rank.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"
#include "comm/communicator.h"

namespace annulus {

// By default a Llama of 13M parameters whose layers take 20 ms and more, forward and backward, on one core.
struct ShardBenchOptions {
  int64_t layers = 4, dim = 512, heads = 8, kv_heads = 4, ffn = 1376;
  int64_t context = 1024, batch = 1;
  int64_t rounds = 40;  // that count; one more runs first
  std::string dtype = "fp32";
};

// Collective. Steps of levels 0 to 3 in turn; CPU seconds of all ranks together. Rank 0 prints a table, with what each
// level sends and holds, and as its last line the same as one JSON object. The ratios are the same on every rank.
std::vector<BenchRatio> run_shard_bench(const ShardBenchOptions& options, Communicator& world, std::ostream& out);

}  // namespace annulus
