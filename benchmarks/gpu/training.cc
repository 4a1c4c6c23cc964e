// The parts "train" and "longest" of `annulus bench gpu`; see gpu.h. Called by gpu.cc.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "config/config.h"
#include "data/dataset.h"
#include "device/device_peak.h"
#include "memory/device_memory.h"
#include "training/memory_plan.h"
#include "training/training.h"

namespace annulus {
namespace {

// If the step can be recorded as a CUDA graph (training/step_graph.h), the fourth step records it, so the counted steps
// are replays.
constexpr int64_t kWarmUpSteps = 5;
constexpr double kGoalMfu = 0.5;
constexpr double kGoalMemory = 1.1;  // peak memory over planned memory

Config config_of(const GpuBenchOptions& o, int64_t context, std::optional<bool> recompute) {
  std::vector<std::string> sets = o.sets;
  sets.push_back("data.context=" + std::to_string(context));
  sets.push_back("data.validation_fraction=0");  // so that rows may be as long as the text
  if (recompute) sets.push_back(std::string("model.recompute=") + (*recompute ? "true" : "false"));
  return load_config(o.config, sets);
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

// Where the memory of a step goes, in bytes, as counted by LibTorch's allocator.
struct StepMemory {
  DeviceMemory after;
  int64_t planned = 0;

  int64_t state() const { return after.allocated; }  // weights, gradients, optimizer: allocated between steps
  int64_t of_step() const { return after.peak_allocated - state(); }
  int64_t unused() const { return after.peak_reserved - after.peak_allocated; }
  std::string text() const {
    return line(
        "planned %.2f GiB; state %.2f, more in a step %.2f, reserved but unused %.2f, outside LibTorch %.2f; device "
        "%.1f",
        gib(planned), gib(state()), gib(of_step()), gib(unused()), gib(after.outside), gib(after.total));
  }
  void add_to(GpuBench& bench, const std::string& name) const {
    for (const auto& [what, bytes] : {std::pair{"peak memory of tensors", after.peak_allocated},
                                      {"planned memory", planned},
                                      {"memory of the state", state()},
                                      {"memory of a step", of_step()},
                                      {"memory reserved but unused", unused()},
                                      {"memory outside LibTorch", after.outside},
                                      {"memory of the device", after.total}}) {
      bench.figure({name + ", " + what, "GiB", gib(bytes), gib(bytes)});
    }
  }
};

struct Steps {
  std::vector<double> seconds;
  double tokens = 0, flops = 0;  // of one step
  int64_t parameters = 0;
  StepMemory memory;
  bool replayed = false;  // whether the last step replayed a CUDA graph
  std::string notes;      // the notes in the steps' results
};

// Measured by wall clock: a step ends by reading its loss, which waits for the device.
Steps run_steps(const Config& config, at::Device device, int64_t warm_ups, int64_t counted) {
  release_cached_memory(device);
  const Dataset data(config.data, config.run.seed);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, device);
  Steps steps;
  steps.memory.planned =
      plan_memory(config, check_training(config, 1), {}, 1, 0, device.is_cuda() ? RanksAre::kGpus : RanksAre::kThreads)
          .total();
  steps.parameters = training.model().parameters().count();
  // The peak comes from the steps before replays begin, because a replay allocates no memory.
  reset_peak_memory(device);
  for (int64_t i = -warm_ups; i < counted; ++i) {
    const double begin = wall_seconds();
    const StepResult result = training.step();
    steps.notes += result.note;
    steps.tokens = static_cast<double>(result.tokens);
    if (i >= 0) steps.seconds.push_back(wall_seconds() - begin);
  }
  steps.flops = training.flops_per_token() * steps.tokens;
  steps.memory.after = device_memory(device);
  steps.replayed = training.replays();
  return steps;
}

}  // namespace

void check_training_part(const GpuBenchOptions& options) {
  if (options.config.empty()) {
    throw Error(
        ErrorKind::kUsage, "bench",
        "the parts train and longest need a model; give --config FILE, such as --config configs/quickstart.toml");
  }
  check_training(config_of(options, options.length, {}), 1);
}

void bench_training_step(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  const Config config = config_of(o, o.length, {});
  const Steps steps = run_steps(config, o.device, kWarmUpSteps, o.rounds);
  const double seconds = least(steps.seconds), middle = median(steps.seconds);
  bench.out << line(
      "training step of a Llama with %lld parameters, rows of %lld tokens, %lld rows\n\n"
      "  seconds             %10.3f (median %.3f)\n"
      "  tokens per second   %10.0f\n"
      "  TFLOP/s             %10.1f (attention: of the pairs that count)\n",
      static_cast<long long>(steps.parameters), static_cast<long long>(config.data.context.longest()),
      static_cast<long long>(config.data.batch), seconds, middle, steps.tokens / seconds, steps.flops / seconds / 1e12);
  bench.out << (steps.replayed ? "  steps are replays of a CUDA graph\n"
                               : "  steps are not recorded as a CUDA graph" +
                                     (steps.notes.empty() ? "" : ": " + steps.notes) + "\n");
  bench.figure({"training step", "s", seconds, middle});
  bench.figure({"training, tokens per second", "tokens/s", steps.tokens / seconds, steps.tokens / middle});
  bench.figure({"training", "TFLOP/s", steps.flops / seconds / 1e12, steps.flops / middle / 1e12});
  const std::optional<double> peak =
      o.peak_flops ? o.peak_flops : peak_flops(gpu_name(o.device), compute_dtype(config), config.tf32);
  const std::string model =
      line("%s, %lld parameters, %lld tokens in a row, %lld rows", bench.facts.name.c_str(),
           static_cast<long long>(steps.parameters), static_cast<long long>(config.data.context.longest()),
           static_cast<long long>(config.data.batch));
  if (peak) {
    const double mfu = steps.flops / seconds / *peak;
    const double goal_seconds = steps.flops / (kGoalMfu * *peak);
    const BenchRatio& r =
        bench.ratios.emplace_back(ratio_of("gpu/training step over one at half of the peak", model, steps.seconds,
                                           std::vector<double>(steps.seconds.size(), goal_seconds), 1.0));
    bench.out << line("  MFU                 %10.3f, goal %.2f: %s\n", mfu, kGoalMfu, r.met() ? "met" : "missed");
    bench.figure({"training, MFU", "share", mfu, steps.flops / middle / *peak});
  } else {
    bench.out << "  MFU                    unknown: the peak of this device is not known\n";
  }
  if (o.device.is_cuda()) {
    bench.out << "  memory                 " << steps.memory.text() << "\n";
    steps.memory.add_to(bench, "training");
    const std::vector<double> peak_bytes = {static_cast<double>(steps.memory.after.peak_allocated)};
    bench.ratios.push_back(ratio_of("gpu/training step's peak memory over the plan", model, peak_bytes,
                                    {static_cast<double>(steps.memory.planned)}, kGoalMemory));
  }
}

void bench_longest_sequence(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  bench.out << "longest row that one device trains, with recomputed activations (model.recompute)\n\n"
            << "      tokens    seconds of a step  memory\n";
  const double begin = wall_seconds();
  int64_t longest = 0;
  double last = 0;  // seconds that the previous length took
  for (int64_t length = o.length; length <= o.longest_length; length *= 2) {
    const std::string row = line("  %10lld  ", static_cast<long long>(length));
    const double began = wall_seconds();
    // Attention over twice the length takes about four times as long.
    if (o.longest_seconds > 0 && longest > 0 && began - begin + 4 * last > o.longest_seconds) {
      bench.out << row << line("not tried: only %.0f s are left\n", std::max(0.0, o.longest_seconds - (began - begin)));
      break;
    }
    try {
      Config config = config_of(o, length, true);
      config.data.batch = 1;
      // The optimizer allocates its state in the first step, so the second step is counted.
      const Steps steps = run_steps(config, o.device, /*warm_ups=*/1, /*counted=*/1);
      longest = length;
      bench.out << row << line("%19.2f  ", least(steps.seconds)) << steps.memory.text() << std::endl;
      const std::string name = line("longest %lld", static_cast<long long>(length));
      bench.figure({name, "s", least(steps.seconds), least(steps.seconds)});
      if (o.device.is_cuda()) steps.memory.add_to(bench, name);
      bench.end_figures("longest");      // the run may be cut off during the next length
    } catch (const c10::Error& error) {  // not c10::OutOfMemoryError: capturing a CUDA graph may raise another type
      if (std::string(error.what_without_backtrace()).find("out of memory") == std::string::npos) throw;
      bench.out << row << "out of memory\n";
      break;
    } catch (const Error& error) {  // for example, the text is too short for such rows: earlier lengths stay valid
      if (longest == 0) throw;
      bench.out << row << error.what() << "\n";
      break;
    }
    last = wall_seconds() - began;
  }
  bench.figure({"longest row trained", "tokens", static_cast<double>(longest), static_cast<double>(longest)});
}

}  // namespace annulus
