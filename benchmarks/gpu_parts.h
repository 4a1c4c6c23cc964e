// What the parts of `annulus bench gpu` share: gpu.cc and gpu_training.cc.
#pragma once

#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "benchmarks/device.h"
#include "benchmarks/gpu.h"
#include "benchmarks/report/report.h"

namespace annulus {

std::string line(const char* format, auto... values) {
  char text[512];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

double least(const std::vector<double>& costs);

// What a part found besides ratios. `value` and `median` of the rounds; the same where there is one round.
struct GpuFigure {
  std::string name, unit;
  double value = 0, median = 0;
};

struct GpuBench {
  const GpuBenchOptions& options;
  const DeviceFacts facts;
  std::ostream& out;
  std::vector<BenchRatio> ratios;
  std::vector<GpuFigure> figures;  // since the last line of JSON
  size_t reported = 0;             // ratios in lines of JSON so far

  void figure(const std::string& name, const std::string& unit, double value, double median) {
    figures.push_back({name, unit, value, median});
  }
  // Prints what there is since the last time as one line of JSON, so that it stands should what follows be cut off.
  void end_figures(const std::string& part);
};

// One side of a comparison: what is called, and what a call cost in each round.
struct TimedSide {
  std::string name;
  std::function<void()> call;
  std::vector<double> seconds = {};
};

// Runs the sides in turn, round by round, each a few times before that. A short call is repeated within a round, so
// that what is measured is the device and not the first launch.
void measure_in_turn(std::vector<TimedSide>& sides, at::Device device, int64_t rounds);

// gpu_training.cc
void check_training_part(const GpuBenchOptions& options);
void bench_training_step(GpuBench& bench);
void bench_longest_sequence(GpuBench& bench);

}  // namespace annulus
