// What gpu.cc, attention.cc and training.cc, the parts of `annulus bench gpu`, share.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/plan.h"
#include "benchmarks/gpu/gpu.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "benchmarks/report.h"

namespace annulus {

struct DeviceFacts {
  std::string name;           // "NVIDIA H200", "cpu"
  std::string versions = {};  // "CUDA 13.0, driver for 13.1, cuDNN 9.19.0"; empty on a CPU
  int64_t multiprocessors = 0;
  int64_t highest_mhz = 0;  // highest clock of the multiprocessors; 0: unknown. nvidia-smi shows the actual clock
};
DeviceFacts device_facts(at::Device device);

struct GpuBench {
  const GpuBenchOptions& options;
  std::ostream& out;
  GpuBenchResult& result;
  const DeviceFacts facts = device_facts(options.device);
  nlohmann::ordered_json figures = nlohmann::ordered_json::array();  // measured since the last line of JSON
  size_t reported = 0;                                               // how many ratios have been printed as JSON

  // A number that a part measured, apart from its ratios: `value` is that of the fastest round and `median` that of the
  // median round. `operators`: those of attention that computed it; empty: none did, or they were not observed.
  // `invalid`: why the figure does not say what its name says; empty: it does.
  void figure(const std::string& name, const std::string& unit, double value, double median,
              const std::string& operators = {}, const std::string& invalid = {}) {
    figures.push_back({{"name", name}, {"unit", unit}, {"value", value}, {"median", median}});
    if (!operators.empty()) figures.back()["operators"] = operators;
    if (!invalid.empty()) figures.back()["invalid"] = invalid;
  }
  void figure(const std::string& name, const std::string& unit, const std::vector<double>& costs,
              const std::string& operators = {}, const std::string& invalid = {}) {
    figure(name, unit, least(costs), median(costs), operators, invalid);
  }
  BenchRatio& ratio(BenchRatio r) { return result.ratios.emplace_back(std::move(r)); }
  // Prints what was measured since the last call as one line of JSON, so that it is kept if the run is cut off later.
  void end_figures(const std::string& part);
};

// One side of a comparison: the function to measure, the seconds of a call in each round, and the attention operators
// that computed it.
struct TimedSide {
  std::string name;
  std::function<void()> call;
  std::vector<double> seconds = {};
  OperatorNames computed = {};  // in all calls that were observed

  std::string operators() const { return text_of_operators(computed); }
};

// Calls each side a few times to warm up, then measures the sides in turn, round by round. A short call is repeated
// within a round, so that the time is that of the device and not of the first launch. The calls that warm up and one
// after the last round are observed for their operators, the measured ones are not.
void measure_in_turn(std::vector<TimedSide>& sides, at::Device device, int64_t rounds);

// [1, heads, kv heads, length, length], the shape of a call with these options.
AttentionShape shape_of(const GpuBenchOptions& options, int64_t length);

// Defined in attention.cc.
void bench_dense(GpuBench& bench);
void bench_ring(GpuBench& bench);
void bench_attention_patterns(GpuBench& bench);

// Defined in training.cc. check_training_part raises Error(kUsage) if the options name no model.
void check_training_part(const GpuBenchOptions& options);
void bench_training_step(GpuBench& bench);
void bench_longest_sequence(GpuBench& bench);

}  // namespace annulus
