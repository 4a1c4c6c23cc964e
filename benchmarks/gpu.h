// `annulus bench gpu`: what the program costs on a GPU beside what it is made of, in one run: attention through the
// executor over calling LibTorch's operator, the ring's own work over one whole call, patterns over their share of the
// dense call, and training steps. Called by program/bench_verb.cc. On a CPU a tiny version of the first three runs,
// which tests the program and measures nothing of use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/report/report.h"

namespace annulus {

struct GpuBenchOptions {
  at::Device device{at::kCUDA, 0};
  std::vector<std::string> parts;  // of gpu_bench_parts(); empty: all that can be run with these options
  std::vector<int64_t> lengths;    // of part "dense"
  int64_t length = 0;              // of "ring", "patterns" and "train", and the first of "longest"
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  at::ScalarType type = at::kBFloat16;  // of attention
  int64_t rounds = 7;                   // counted ones
  int ranks = 8;                        // of "ring"
  std::string config;                   // TOML of the model of "train" and "longest"
  std::vector<std::string> sets;        // overrides of its keys
  std::optional<double> peak_flops;     // of the device for the model's dtype, a second; without it there is no MFU
  double longest_seconds = 0;           // "longest" tries no length that would take it beyond this; 0: any
  int64_t longest_length = int64_t{1} << 24;  // where it ends at the latest
};

// "dense", "ring", "patterns", "train", "longest"
const std::vector<std::string>& gpu_bench_parts();

// The sizes that the goals are stated for; on a CPU tiny ones, in fp32.
GpuBenchOptions gpu_bench_options(at::Device device);

// Prints tables, and a line of JSON after each length, pattern or part:
//   {"bench":"gpu","part":"dense","device":...,"figures":[{"name":...,"unit":...,"value":...,"median":...},...],
//    "ratios":[...]}, the ratios as in a report
// Raises Error(kUsage, kPlan) for options that cannot be, before memory is taken, and Error(kInternal) where a result
// is not the oracle's.
std::vector<BenchRatio> run_gpu_bench(const GpuBenchOptions& options, std::ostream& out);

}  // namespace annulus
