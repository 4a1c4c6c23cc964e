// `annulus bench gpu`: what attention and training cost on a GPU, each compared within one run with a baseline:
// attention through the executor with a direct call of LibTorch's operator, a whole ring with one call, patterns with
// their share of the dense call; and training steps. Used by tests.
// With --device cpu it runs tiny sizes, which tests the program and measures nothing of use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "benchmarks/report.h"

namespace annulus {

struct GpuBenchOptions {
  at::Device device{at::kCUDA, 0};
  // "dense", "ring", "train", "patterns", "longest"; empty: all that these options allow.
  std::vector<std::string> parts;
  std::vector<int64_t> lengths;  // tokens, for the part "dense"
  int64_t length = 0;            // tokens, for "ring", "patterns" and "train"; "longest" begins with it
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  at::ScalarType type = at::kBFloat16;  // dtype of the attention tensors
  // Of the executor. Where its operator is not the baseline's, the figures are invalid.
  KernelKind kernel = KernelKind::kAuto;
  int64_t rounds = 7;                // rounds that count; warm-up calls come before them
  int ranks = 8;                     // ranks of the ring, which are threads that share the device
  std::string config;                // path of the TOML file with the model for "train" and "longest"
  std::vector<std::string> sets;     // overrides of its keys, "model.layers=4"
  std::optional<double> peak_flops;  // FLOP/s of the device in the model's dtype; empty: those device_peak.h has
  double longest_seconds = 0;        // "longest" tries no length expected to end after this; 0: no limit
  int64_t longest_length = int64_t{1} << 24;  // "longest" tries no length above this
  // "longest" goes at once to the longest row that is planned to fit into these bytes; 0: the device's memory, if
  // known.
  int64_t longest_memory = 0;
};

// The default options: on a GPU the sizes that the goals are stated for, on a CPU tiny sizes in fp32.
GpuBenchOptions gpu_bench_options(at::Device device);

struct GpuBenchResult {
  std::vector<BenchRatio> ratios;
  std::string wrong;  // what was too far from its reference, and so was left out; empty: nothing
};

// Prints tables, and a line of JSON as soon as something is measured:
//   {"bench":"gpu","part":"dense","device":...,"versions":...,"highest_mhz":...,
//    "figures":[{"name":...,"unit":...,"value":...,"median":...,"operators":...,"invalid":...},...],"ratios":[...]}
// with the ratios in the form of a report (benchmarks/report.h), and the last two keys of a figure where they say
// something. Raises Error(kUsage) or Error(kPlan) for invalid options, before it allocates memory.
GpuBenchResult run_gpu_bench(const GpuBenchOptions& options, std::ostream& out);

}  // namespace annulus
