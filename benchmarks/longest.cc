// `annulus bench longest`: the longest row that a model of many thin layers trains on in a given memory, with all that
// layers make kept, with recomputation, and with offload to files; each length is planned, and confirmed by a step.
#include <ATen/Parallel.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "common/error.h"
#include "common/text.h"
#include "memory/peak_bytes.h"
#include "runtime/data/dataset.h"
#include "runtime/training/fitting.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr double kLongerGoal = 5;      // times the longest row without recomputation and offload
constexpr double kPlannedGoal = 1.05;  // the measured peak over the planned one
constexpr double kCostGoal = 1.10;     // CPU seconds a token over those of recomputation alone

class LongestBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--memory", memory_text_, "what each rank may take: 1GiB, 200MB");
    add(app, "--layers", llama_.layers, "layers");
    add(app, "--dim", llama_.dim, "width, a multiple of 16");
    add(app, "--window", window_, "keys that a query sees");
    add(app, "--rounds,--repeats", rounds_, "rounds of the comparison of costs that count");
    add(app, "--files", files_, "folder for offloaded files");
    app.footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench longest --memory 200MB");
  }

  void check() override {
    if (const auto bytes = bytes_of_text(memory_text_)) {
      memory_ = static_cast<double>(*bytes);
    } else {
      throw Error(ErrorKind::kUsage, "bench",
                  "longest: --memory: expected a number of bytes such as 1GiB or 200MB, got \"" + memory_text_ + "\"");
    }
    if (!std::filesystem::is_directory(files_)) {
      throw Error(ErrorKind::kUsage, "bench", "longest: --files: there is no folder " + files_);
    }
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(1);
    const FitTable table = what_fits(
        config_of(Keeps::kRecomputed, 1024),
        {.ranks = world.size(), .ranks_of_a_host = world.size(), .are = RanksAre::kProcesses, .memory = memory_});
    const std::string settings = line("%lld layers of %lld, %lld ranks of one thread, %s each, windows of %lld",
                                      llama_.layers, llama_.dim, world.size(), memory_text_, window_);
    if (world.rank() == 0) {
      out << settings << "\n\n"
          << "  keeps       longest row   over all   MB planned   MB measured   measured/planned   s a step   s "
             "waited\n";
    }
    nlohmann::json json = {{"bench", "longest"}, {"ranks", world.size()}, {"memory", memory_}};
    std::vector<BenchRatio> ratios;
    std::array<int64_t, kAllKeeps.size()> longest{};
    for (size_t i = 0; i < kAllKeeps.size(); ++i) {
      longest[i] = table.fits[i].longest.value_or(0);
      if (longest[i] == 0) {
        throw Error(ErrorKind::kResource, "bench",
                    "longest: no row fits into " + memory_text_ + " a rank: give --memory more");
      }
      const Measured m = measure(world, kAllKeeps[i], longest[i]);
      if (world.rank() != 0) continue;
      const double over_all = static_cast<double>(longest[i]) / static_cast<double>(longest[0]);
      const double of_plan = m.peak / m.planned;
      out << line("  %-9s  %12s   %8.2f   %10.1f   %11.1f   %16.3f   %8.2f   %8.2f\n",
                  std::string(to_string(kAllKeeps[i])), with_commas(longest[i]), over_all, m.planned / 1e6,
                  m.peak / 1e6, of_plan, m.seconds, m.waited);
      json["keeps"].push_back({{"keeps", to_string(kAllKeeps[i])},
                               {"longest", longest[i]},
                               {"bytes_planned", m.planned},
                               {"bytes_measured", m.peak},
                               {"seconds", m.seconds},
                               {"seconds_waited", m.waited}});
      ratios.push_back(ratio_of(line("longest/peak %s", std::string(to_string(kAllKeeps[i]))), settings, {m.peak},
                                {m.planned}, kPlannedGoal));
    }
    // The shorter, the better.
    const BenchRatio longer = ratio_of("longest/all over offload", settings, {static_cast<double>(longest[0])},
                                       {static_cast<double>(longest[2])}, 1 / kLongerGoal);
    ratios.push_back(longer);
    const BenchRatio cost = compare(world, settings, longest[1]);
    ratios.push_back(cost);
    if (world.rank() != 0) return {};
    out << line(
        "\nCPU seconds a token with offload over those with recomputation alone, rows of %s: %.3f (%.3f to %.3f), "
        "goal %.2f: %s\n",
        with_commas(longest[1]), cost.ratio, cost.low, cost.high, kCostGoal, std::string(met_or_missed(cost.met())));
    out << line("rows with offload over rows with all kept: %.2f, goal %.0f: %s\n",
                static_cast<double>(longest[2]) / static_cast<double>(longest[0]), kLongerGoal,
                std::string(met_or_missed(longer.met())));
    out << "\n" << json.dump() << std::endl;
    return ratios;
  }

 private:
  struct Measured {
    double peak = 0, planned = 0;  // bytes of the rank with the highest peak
    double seconds = 0;            // of the step
    double waited = 0;             // for the tier, of the rank that waited longest
  };

  Config config_of(Keeps keeps, int64_t length) const {
    SmallLlama llama = llama_;
    llama.context = length;
    Config config = annulus::config_of(llama);
    config.data.validation_fraction = 0;
    config.model.pattern.all =
        parse_pattern("{ kind = 'window', left = " + std::to_string(window_ - 1) + ", right = 0 }", "bench");
    config.model.recompute = keeps != Keeps::kAll;
    config.memory.offload = keeps >= Keeps::kOffloaded ? "file" : "none";
    config.optimizer.offload = keeps == Keeps::kOptimizer ? "file" : "none";
    config.memory.files = files_;
    return config;
  }

  // Makes two steps, of which the second is timed.
  Measured measure(Communicator& world, Keeps keeps, int64_t length) const {
    const Config config = config_of(keeps, length);
    const auto bytes = std::make_shared<PeakBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    Training training(config, world, data, at::kCPU);
    training.step();
    const double begin = wall_seconds(), waited = training.offloaded() ? training.offloaded()->waited : 0;
    training.step();
    const double seconds = wall_seconds() - begin;
    const MemoryPlan plan =
        plan_memory(config, check_training(config, world.size()), make_sharding(config, world.size(), world.size()),
                    world.size(), world.rank(), RanksAre::kProcesses);
    const auto offloaded = training.offloaded();
    const std::vector<double> most = over_ranks(world,
                                                {static_cast<double>(bytes->peak()), static_cast<double>(plan.total()),
                                                 seconds, offloaded ? offloaded->waited - waited : 0},
                                                ReduceOp::kMax);
    return {most[0], most[1], most[2], most[3]};
  }

  // Steps with and without offload in turn, in CPU seconds of all ranks together.
  BenchRatio compare(Communicator& world, const std::string& settings, int64_t length) const {
    const Config with = config_of(Keeps::kOffloaded, length), without = config_of(Keeps::kRecomputed, length);
    const Dataset data(with.data, with.run.seed, with.model.vocab);
    std::array<std::unique_ptr<Training>, 2> trainings = {std::make_unique<Training>(with, world, data, at::kCPU),
                                                          std::make_unique<Training>(without, world, data, at::kCPU)};
    std::array<std::vector<double>, 2> costs;
    for (int64_t round = 0; round <= rounds_; ++round) {
      for (size_t turn = 0; turn < 2; ++turn) {
        const size_t which = (static_cast<size_t>(round) + turn) % 2;
        world.barrier({"a round of the benchmark", round, "round"});
        const double cpu = cpu_seconds();
        trainings[which]->step();
        const double spent = over_ranks(world, {cpu_seconds() - cpu}, ReduceOp::kSum)[0];
        if (round > 0) costs[which].push_back(spent);  // the first touches memory
      }
    }
    return ratio_of("longest/cpu of offload", settings, costs[0], costs[1], kCostGoal);
  }

  SmallLlama llama_ = {
      .layers = 24, .dim = 64, .heads = 2, .kv_heads = 1, .ffn = 192, .steps = 100, .text_bytes = 16 << 20};
  int64_t window_ = 256, rounds_ = 3;
  std::string memory_text_ = "1GiB", files_ = "/tmp";
  double memory_ = 0;
};

}  // namespace

std::unique_ptr<Benchmark> make_longest_benchmark() { return std::make_unique<LongestBenchmark>(); }

}  // namespace annulus
