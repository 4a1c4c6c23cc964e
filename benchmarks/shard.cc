// `annulus bench shard`: the cost of a training step whose ranks share weights, gradients and optimizer state
// (optimizer.shard of 1 to 3), compared with one in which each rank holds all of them (0).
#include <ATen/Parallel.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "runtime/data/dataset.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr size_t kLevels = 4;
// The goals: what levels 1 to 3 may cost over level 0, if a layer takes at least kLayer seconds.
constexpr std::array<double, kLevels> kGoals = {1, 1.03, 1.03, 1.06};
constexpr double kLayer = 0.010;

struct Level {
  std::unique_ptr<Training> training;
  std::vector<double> cpu, wall, reduce_wait, gather_wait;
  int64_t sent = 0, planned = 0;  // bytes that this rank sent in the last step, and that it was planned to hold
  double loss = 0;
};

class ShardBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--layers", llama_.layers, "layers");
    add(app, "--dim", llama_.dim, "width, a multiple of 16");
    add(app, "--length", llama_.context, "tokens of a row");
    add(app, "--dtype", dtype_, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
    add(app, "--repeats,--rounds", rounds_, "rounds that count");
    app.footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench shard");
  }

  // Measures steps of the levels 0 to 3 in turn, in CPU seconds of all ranks together, after one step of each.
  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(1);
    llama_.steps = rounds_ + 1;
    Config config = config_of(llama_);
    config.model.dtype = dtype_;
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    std::array<Level, kLevels> levels;
    for (size_t level = 0; level < kLevels; ++level) {
      config.optimizer.shard = static_cast<int64_t>(level);
      Level& l = levels[level];
      l.training = std::make_unique<Training>(config, world, data, at::kCPU);
      l.training->step();  // touches memory for the first time
      l.planned =
          plan_memory(config, check_training(config, world.size()), make_sharding(config, world.size(), world.size()),
                      world.size(), world.rank(), RanksAre::kProcesses)
              .total();
    }
    for (size_t round = 0; round < static_cast<size_t>(rounds_); ++round) {
      // Each round begins with another level.
      for (size_t turn = 0; turn < kLevels; ++turn) {
        Level& l = levels[(round + turn) % kLevels];
        const Communicator* state = l.training->model_state().sharers();
        const CommStats before = state != nullptr ? state->stats() : CommStats();
        world.barrier({"a round of the benchmark", static_cast<int64_t>(round), "round"});
        const double cpu = cpu_seconds(), wall = wall_seconds();
        l.loss = l.training->step().loss;
        l.cpu.push_back(over_ranks(world, {cpu_seconds() - cpu}, ReduceOp::kSum)[0]);
        l.wall.push_back(wall_seconds() - wall);
        const CommStats after = state != nullptr ? state->stats() : CommStats();
        l.sent = after.collective_bytes_sent - before.collective_bytes_sent;
        l.reduce_wait.push_back(after.reduce_wait_seconds - before.reduce_wait_seconds);
        l.gather_wait.push_back(after.gather_wait_seconds - before.gather_wait_seconds);
      }
    }
    if (world.rank() != 0) return {};

    const std::string settings =
        line("a Llama of %lld parameters in %s, %lld tokens, %lld ranks of one thread",
             levels[0].training->model().parameters().count(), dtype_, llama_.batch * llama_.context, world.size());
    const double layer = least(levels[0].cpu) / world.size() / static_cast<double>(llama_.layers);
    out << settings << line("; least of %lld steps; %.0f ms a layer and rank\n\n", rounds_, 1e3 * layer)
        << "  level  CPU s a step   over level 0   quartiles       goal   s a step   reduce  gather   MB sent   MB "
           "planned\n";
    std::vector<BenchRatio> ratios;
    nlohmann::json json = {{"bench", "shard"}, {"ranks", world.size()}, {"layer_seconds", layer}};
    for (size_t level = 0; level < kLevels; ++level) {
      const Level& l = levels[level];
      const std::optional<double> goal = layer >= kLayer ? std::optional(kGoals[level]) : std::nullopt;
      const BenchRatio ratio = ratio_of(line("shard/level %lld", level), settings, l.cpu, levels[0].cpu, goal);
      if (level > 0) ratios.push_back(ratio);
      const double cpu = least(l.cpu), wall = median(l.wall), reduce = median(l.reduce_wait),
                   gather = median(l.gather_wait);
      out << line("  %5lld  %12.4f   %12.3f   %.3f to %.3f   %4.2f   %8.3f   %6.3f  %6.3f   %7.2f   %10.1f\n", level,
                  cpu, ratio.ratio, ratio.low, ratio.high, kGoals[level], wall, reduce, gather,
                  static_cast<double>(l.sent) / 1e6, static_cast<double>(l.planned) / 1e6);
      json["levels"].push_back({{"level", level},
                                {"cpu_seconds", cpu},
                                {"wall_seconds", wall},
                                {"reduce_wait_seconds", reduce},
                                {"gather_wait_seconds", gather},
                                {"over_level_0", ratio.ratio},
                                {"bytes_sent", l.sent},
                                {"bytes_planned", l.planned},
                                {"loss", l.loss}});
    }
    out << "\n" << json.dump() << std::endl;
    return ratios;
  }

 private:
  // 11.9M parameters: each layer takes well over 10 ms, forward and backward, on one core, below which there is no
  // goal.
  SmallLlama llama_ = {.dim = 512, .heads = 8, .kv_heads = 4, .ffn = 1376, .text_bytes = 16 << 20};
  int64_t rounds_ = 40;
  std::string dtype_ = "fp32";
};

}  // namespace

std::unique_ptr<Benchmark> make_shard_benchmark() { return std::make_unique<ShardBenchmark>(); }

}  // namespace annulus
