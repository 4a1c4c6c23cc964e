// The parts "train" and "longest" of `annulus bench gpu`; see gpu.h. Called by gpu.cc.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "comm/agreement.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/device_memory.h"
#include "runtime/config/config.h"
#include "runtime/data/dataset.h"
#include "runtime/training/device_peak.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

// If the step can be recorded as a CUDA graph (runtime/training/step_graph.h), the fourth step records it, so the
// counted steps are replays.
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

// Where the memory of a step goes: as it is planned by purpose and, on a GPU, as counted by LibTorch's allocator.
struct StepMemory {
  MemoryKinds planned;
  DeviceMemory after;

  bool counted() const { return after.total > 0; }
  std::string text() const {
    std::string text = line("planned %.2f GiB (", gib(planned.total()));
    for (const Row& row : by_purpose()) text += line("%s %.2f, ", row.label, gib(row.bytes));
    text.replace(text.size() - 2, 2, counted() ? "); " : ")");
    for (const Row& row : by_counting()) text += line("%s %.2f, ", row.label, gib(row.bytes));
    if (counted()) text.resize(text.size() - 2);
    return text;
  }
  void add_to(GpuBench& bench, const std::string& name) const {
    const auto add = [&](const char* what, int64_t bytes) { bench.figure(name + what, "GiB", {gib(bytes)}); };
    for (const Row& row : by_purpose()) add((std::string(", planned ") + row.label).c_str(), row.bytes);
    add(", planned memory", planned.total());
    if (counted()) add(", peak memory of tensors", after.peak_allocated);
    for (const Row& row : by_counting()) add(row.figure, row.bytes);
  }

 private:
  struct Row {
    const char* label;
    int64_t bytes;
    const char* figure = nullptr;
  };
  std::vector<Row> by_purpose() const {
    return {{"weights", planned.weights},
            {"gradients", planned.gradients},
            {"optimizer", planned.optimizer},
            {"activations", planned.activations},
            {"working memory", planned.working}};
  }
  std::vector<Row> by_counting() const {
    if (!counted()) return {};
    const int64_t state = after.allocated;  // weights, gradients, optimizer: allocated between steps
    return {{"state", state, ", memory of the state"},
            {"more in a step", after.peak_allocated - state, ", memory of a step"},
            {"reserved but unused", after.peak_reserved - after.peak_allocated, ", memory reserved but unused"},
            {"outside LibTorch", after.outside, ", memory outside LibTorch"},
            {"device", after.total, ", memory of the device"}};
  }
};

struct Steps {
  std::vector<double> seconds;
  double tokens = 0, flops = 0;  // of one step
  int64_t parameters = 0;
  StepMemory memory;
  bool replayed = false;  // whether the last step replayed a CUDA graph
  std::string notes;      // the notes in the steps' results
  std::string operators;  // of attention, in the forward of the steps before replays begin
};

MemoryPlan planned(const Config& config, at::Device device) {
  return plan_memory(config, check_training(config, 1), {}, 1, 0,
                     device.is_cuda() ? RanksAre::kGpus : RanksAre::kThreads);
}

// Measured by wall clock: a step ends by reading its loss, which waits for the device. each_step is called after each
// step with its seconds and its note.
Steps run_steps(const Config& config, at::Device device, int64_t warm_ups, int64_t counted,
                const std::function<void(double seconds, const std::string& note)>& each_step) {
  release_cached_memory(device);
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, device);
  Steps steps;
  steps.memory.planned = planned(config, device).kinds();
  steps.parameters = training.model().parameters().count();
  // The peak comes from the steps before replays begin, because a replay allocates no memory.
  reset_peak_memory(device);
  std::optional<OperatorsSeen> seen(std::in_place);
  for (int64_t i = -warm_ups; i < counted; ++i) {
    if (i == 0) {
      steps.operators = text_of_operators(seen->names());
      seen.reset();
    }
    const double begin = wall_seconds();
    const StepResult result = training.step();
    steps.notes += result.note;
    steps.tokens = static_cast<double>(result.tokens);
    const double seconds = wall_seconds() - begin;
    if (i >= 0) steps.seconds.push_back(seconds);
    if (each_step) each_step(seconds, result.note);
  }
  steps.flops = training.flops_per_token() * steps.tokens;
  steps.memory.after = device_memory(device);
  steps.replayed = training.replays();
  return steps;
}

// Twice and one and a half times the row before, by turns; the first two are `first` and its double.
std::vector<int64_t> rows_to_try(int64_t first, int64_t longest) {
  std::vector<int64_t> rows = {first};
  for (int64_t length = 2 * first; length <= longest; length *= 2) {
    rows.push_back(length);
    if (length + length / 2 <= longest) rows.push_back(length + length / 2);
  }
  return rows;
}

struct TrainedRow {
  int64_t length = 0;
  double seconds = 0;  // of the set-up and all steps
  double flops = 0;    // of a step
};

// The seconds that a longer row should take, from the rows before. The FLOPs of a step are a n + b n^2, with the pairs
// of attention in b; from one row alone all of them are taken for pairs.
double expected_seconds(const std::vector<TrainedRow>& trained, int64_t length) {
  const TrainedRow& last = trained.back();
  const auto n = static_cast<double>(length), m = static_cast<double>(last.length);
  if (trained.size() < 2) return last.seconds * n * n / (m * m);
  const TrainedRow& first = trained.front();
  const auto f = static_cast<double>(first.length);
  const double b = (last.flops / m - first.flops / f) / (m - f), a = last.flops / m - b * m;
  return last.seconds * (a * n + b * n * n) / last.flops;
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
  bench.out << "seconds of each step, the first ones to warm up:";
  const Steps steps = run_steps(config, o.device, kWarmUpSteps, o.rounds, [&](double seconds, const std::string& note) {
    bench.out << line(" %.3f", seconds) << (note.empty() ? "" : " (" + note + ")") << std::flush;
  });
  bench.out << "\n\n";
  const double seconds = least(steps.seconds), middle = median(steps.seconds);
  bench.out << line(
      "training step of a Llama with %lld parameters, rows of %lld tokens, %lld rows\n\n"
      "  seconds             %10.3f (median %.3f)\n"
      "  tokens per second   %10.0f\n"
      "  TFLOP/s             %10.1f (attention: of the pairs that count)\n",
      steps.parameters, config.data.context.longest(), config.data.batch, seconds, middle, steps.tokens / seconds,
      steps.flops / seconds / 1e12);
  bench.out << (steps.replayed ? "  steps are replays of a CUDA graph\n"
                               : "  steps are not recorded as a CUDA graph" +
                                     (steps.notes.empty() ? "" : ": " + steps.notes) + "\n");
  bench.out << "  attention           computed by " << steps.operators << "\n";
  bench.figure("training step", "s", steps.seconds, steps.operators);
  bench.figure("training, tokens per second", "tokens/s", steps.tokens / seconds, steps.tokens / middle);
  bench.figure("training", "TFLOP/s", steps.flops / seconds / 1e12, steps.flops / middle / 1e12);
  const std::optional<double> peak =
      o.peak_flops ? o.peak_flops : peak_flops(gpu_name(o.device), compute_dtype(config), config.tf32);
  const std::string model = line("%s, %lld parameters, %lld tokens in a row, %lld rows", bench.facts.name.c_str(),
                                 steps.parameters, config.data.context.longest(), config.data.batch);
  if (peak) {
    const double mfu = steps.flops / seconds / *peak;
    const double goal_seconds = steps.flops / (kGoalMfu * *peak);
    const BenchRatio& r = bench.ratio(ratio_of("gpu/training step over one at half of the peak", model, steps.seconds,
                                               std::vector<double>(steps.seconds.size(), goal_seconds), 1.0));
    bench.out << line("  MFU                 %10.3f (median %.3f), goal %.2f: %s\n", mfu, steps.flops / middle / *peak,
                      kGoalMfu, r.met() ? "met" : "missed");
    bench.figure("training, MFU", "share", mfu, steps.flops / middle / *peak);
  } else {
    bench.out << "  MFU                    unknown: the peak of this device is not known\n";
  }
  bench.out << "  memory              " << steps.memory.text() << "\n";
  steps.memory.add_to(bench, "training");
  if (steps.memory.counted()) {
    const std::vector<double> peak_bytes = {static_cast<double>(steps.memory.after.peak_allocated)};
    bench.ratio(ratio_of("gpu/training step's peak memory over the plan", model, peak_bytes,
                         {static_cast<double>(steps.memory.planned.total())}, kGoalMemory));
  }
}

void bench_longest_sequence(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  bench.out << "longest row that one device trains, with recomputed activations (model.recompute)\n\n"
            << "      tokens    seconds of a step  memory\n";
  const double begin = wall_seconds();
  std::vector<TrainedRow> trained;
  const auto config_for = [&](int64_t length) {
    Config config = config_of(o, length, true);
    config.data.batch = 1;
    return config;
  };
  const auto shown = [](int64_t length) { return line("  %10lld  ", length); };
  const auto left = [&] {
    return o.longest_seconds > 0 ? o.longest_seconds - (wall_seconds() - begin) : std::numeric_limits<double>::max();
  };
  const auto trains = [&](int64_t length) {
    const double began = wall_seconds();
    try {
      // The optimizer allocates its state in the first step, so the second step is counted.
      const Steps steps = run_steps(config_for(length), o.device, /*warm_ups=*/1, /*counted=*/1, nullptr);
      trained.push_back({length, wall_seconds() - began, steps.flops});
      bench.out << shown(length) << line("%19.2f  ", least(steps.seconds)) << steps.memory.text() << std::endl;
      const std::string name = line("longest %lld", length);
      bench.figure(name, "s", steps.seconds, steps.operators);
      steps.memory.add_to(bench, name);
      bench.end_figures("longest");  // the run may be cut off during the next length
      return true;
    } catch (...) {
      // Too little memory ends the search, and so does anything that only longer rows cannot have, such as enough text.
      const Error error = error_in_flight("");
      const bool of_length = !trained.empty() && error.kind() != ErrorKind::kInternal;
      if (error.kind() != ErrorKind::kResource && !of_length) throw;
      bench.out << shown(length) << error.message() << std::endl;
    }
    return false;
  };
  // Two short rows come first, from which the time of longer ones follows. Then, if the device's memory is known, the
  // longest row that is planned to fit and expected to end in time; otherwise one after the other.
  const int64_t memory = o.longest_memory > 0 ? o.longest_memory : device_memory(o.device).total;
  const std::vector<int64_t> rows = rows_to_try(o.length, o.longest_length);
  size_t past = rows.size();  // the first row that cannot be trained
  for (size_t next = 0; next < past;) {
    const size_t shortest = next;
    for (size_t i = shortest + 1; memory > 0 && trained.size() >= 2 && i < past; ++i) {
      if (expected_seconds(trained, rows[i]) > left() || planned(config_for(rows[i]), o.device).total() > memory) break;
      next = i;
    }
    if (!trained.empty() && expected_seconds(trained, rows[next]) > left()) {
      bench.out << shown(rows[next]) << line("not tried: only %.0f s are left\n", std::max(0.0, left()));
      break;
    }
    if (trains(rows[next])) {
      ++next;
    } else {
      past = next;
      next = shortest;
    }
  }
  // Between the last row and one that failed and was not planned to fit, the longest that is.
  const bool too_long = past < rows.size() && memory > 0 && planned(config_for(rows[past]), o.device).total() > memory;
  if (too_long && trained.size() >= 2) {
    const int64_t step = std::max<int64_t>(1, o.length / 16);
    int64_t fits = trained.back().length / step, above = rows[past] / step;  // in steps
    while (above - fits > 1) {
      const int64_t middle = (fits + above) / 2;
      (planned(config_for(middle * step), o.device).total() <= memory ? fits : above) = middle;
    }
    const int64_t length = fits * step;
    if (length > trained.back().length && expected_seconds(trained, length) <= left()) trains(length);
  }
  const double longest = trained.empty() ? 0 : static_cast<double>(trained.back().length);
  bench.figure("longest row trained", "tokens", {longest});
}

}  // namespace annulus
