// Measures how long a job takes to start: StartTimes and its functions in comm.h.
#include <ATen/ops/tensor.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>

#include "benchmarks/comm/comm.h"
#include "benchmarks/measure.h"
#include "common/error.h"
#include "data/dataset.h"
#include "training/training.h"

namespace annulus {
namespace {

constexpr std::array<std::pair<const char*, double StartTimes::*>, 5> kTimes = {{{"process", &StartTimes::process},
                                                                                 {"program", &StartTimes::program},
                                                                                 {"joined", &StartTimes::joined},
                                                                                 {"model", &StartTimes::model},
                                                                                 {"step", &StartTimes::step}}};

// The start of this process in seconds of CLOCK_MONOTONIC. /proc gives it in clock ticks since the boot.
double process_start() {
  std::ifstream file("/proc/self/stat");
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the program's name may contain spaces and parentheses
  std::string field;
  constexpr int kStart = 20;  // the number of the field "starttime", counted after the name
  for (int i = 0; i < kStart; ++i) fields >> field;
  const double since_boot = std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
  return wall_seconds() - (seconds_of(CLOCK_BOOTTIME) - since_boot);
}

}  // namespace

StartTimes start_times_of_process() {
  StartTimes times;
  times.process = process_start();
  times.program = wall_seconds();
  return times;
}

void start_and_step(Communicator& world, StartTimes times, const std::string& path) {
  times.joined = wall_seconds();
  Config config;
  config.device = "cpu";
  config.run.steps = 1;
  config.data.train = {"python-sources"};
  config.data.max_bytes = 1 << 20;
  config.data.context = 256;
  config.data.batch = 1;
  config.model.layers = 1;
  config.model.dim = 64;
  config.model.heads = 2;
  config.model.kv_heads = 2;
  config.model.ffn = 128;
  const Dataset data(config.data, config.run.seed);
  Training training(config, world, data, at::kCPU);
  times.model = wall_seconds();
  training.step();
  times.step = wall_seconds();
  nlohmann::json json;
  for (const auto& [name, member] : kTimes) {
    at::Tensor last = at::tensor({times.*member}, at::TensorOptions().dtype(at::kDouble));
    world.all_reduce(last, ReduceOp::kMax, {"start", 0});
    json[name] = last.item<double>();
  }
  if (world.rank() != 0) return;
  std::ofstream file(path);
  file << json.dump() << "\n";
  if (!file.flush()) throw Error(ErrorKind::kResource, "bench", "cannot write " + path);
}

StartTimes read_start_times(const std::string& path) {
  std::ifstream file(path);
  StartTimes times;
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    for (const auto& [name, member] : kTimes) times.*member = json.at(name).get<double>();
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorKind::kInput, "bench", path + " does not hold the times of a start: " + e.what());
  }
  return times;
}

std::string start_text(const StartTimes& t, double began) {
  char text[256];
  std::snprintf(text, sizeof text, "%9.2f  %9.2f  %9.2f  %9.2f  %9.2f  %9.2f", t.process - began, t.program - t.process,
                t.joined - t.program, t.model - t.joined, t.step - t.model, t.step - began);
  return text;
}

}  // namespace annulus
