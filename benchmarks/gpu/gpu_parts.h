// What gpu.cc, attention.cc and training.cc, the parts of `annulus bench gpu`, share.
#pragma once

#include <cstdio>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/plan.h"
#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/gpu.h"
#include "benchmarks/measure.h"
#include "benchmarks/report/report.h"

namespace annulus {

double least(const std::vector<double>& costs);

// A number that a part measured, apart from its ratios. `value` is that of the fastest round and `median` that of the
// median round; both are the same if there is one round.
struct GpuFigure {
  std::string name, unit;
  double value = 0, median = 0;
  std::string operators = {};  // the attention operators that computed it; empty: none did, or they were not observed
  std::string invalid = {};    // why the figure does not say what its name says; empty: it does
};

struct GpuBench {
  const GpuBenchOptions& options;
  const DeviceFacts facts;
  std::ostream& out;
  std::vector<BenchRatio> ratios;
  std::vector<GpuFigure> figures;  // measured since the last line of JSON
  size_t reported = 0;             // how many ratios have been printed as JSON
  std::vector<std::string> wrong;  // what was computed wrongly; the run goes on, and fails at its end

  void figure(GpuFigure f) { figures.push_back(std::move(f)); }
  // Prints what was measured since the last call as one line of JSON, so that it is kept if the run is cut off later.
  void end_figures(const std::string& part);
};

// One side of a comparison: the function to measure, the seconds of a call in each round, and the attention operators
// that computed it.
struct TimedSide {
  std::string name;
  std::function<void()> call;
  std::vector<double> seconds = {};
  std::map<std::string, int64_t> calls = {};  // of each operator, in all calls that were observed
  std::string operators = {};                 // their names, as text_of_operators writes them
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
