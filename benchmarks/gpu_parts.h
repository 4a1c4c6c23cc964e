// What gpu.cc and gpu_training.cc, the parts of `annulus bench gpu`, share.
#pragma once

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/device.h"
#include "benchmarks/gpu.h"
#include "benchmarks/measure.h"
#include "benchmarks/report/report.h"

namespace annulus {

double least(const std::vector<double>& costs);

// A number that a part measured, apart from its ratios. `value` is that of the fastest round and `median` that of the
// median round; both are the same if there is one round.
struct GpuFigure {
  std::string name, unit;
  double value = 0, median = 0;
};

struct GpuBench {
  const GpuBenchOptions& options;
  const DeviceFacts facts;
  std::ostream& out;
  std::vector<BenchRatio> ratios;
  std::vector<GpuFigure> figures;  // measured since the last line of JSON
  size_t reported = 0;             // how many ratios have been printed as JSON

  void figure(const std::string& name, const std::string& unit, double value, double median) {
    figures.push_back({name, unit, value, median});
  }
  // Prints what was measured since the last call as one line of JSON, so that it is kept if the run is cut off later.
  void end_figures(const std::string& part);
};

// One side of a comparison: the function to measure, and the seconds of a call in each round.
struct TimedSide {
  std::string name;
  std::function<void()> call;
  std::vector<double> seconds = {};
};

// Calls each side a few times to warm up, then measures the sides in turn, round by round. A short call is repeated
// within a round, so that the time is that of the device and not of the first launch.
void measure_in_turn(std::vector<TimedSide>& sides, at::Device device, int64_t rounds);

// Defined in gpu_training.cc. check_training_part raises Error(kUsage) if the options name no model.
void check_training_part(const GpuBenchOptions& options);
void bench_training_step(GpuBench& bench);
void bench_longest_sequence(GpuBench& bench);

}  // namespace annulus
