// Implements shard.h.
#include "benchmarks/shard.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "data/dataset.h"
#include "training/memory_plan.h"
#include "training/training.h"

namespace annulus {
namespace {

constexpr int64_t kLevels = 4;
// The goals: what levels 1 to 3 may cost over level 0, if a layer takes at least kLayer seconds.
constexpr std::array<double, kLevels> kGoals = {1, 1.03, 1.03, 1.06};
constexpr double kLayer = 0.010;

double over_all_ranks(Communicator& world, double mine, int64_t round) {
  at::Tensor sum = at::full({1}, mine, at::kDouble);
  if (world.size() > 1) world.all_reduce(sum, ReduceOp::kSum, {"CPU seconds", round, "round"});
  return sum.item<double>();
}

}  // namespace

std::vector<BenchRatio> run_shard_bench(const ShardBenchOptions& options, Communicator& world, std::ostream& out) {
  at::set_num_threads(1);
  Config config;
  config.device = "cpu";
  config.run.steps = options.rounds + 1;
  config.data.train = {"python-sources"};
  config.data.max_bytes = 16 << 20;
  config.data.context = options.context;
  config.data.batch = options.batch;
  config.model.layers = options.layers;
  config.model.dim = options.dim;
  config.model.heads = options.heads;
  config.model.kv_heads = options.kv_heads;
  config.model.ffn = options.ffn;
  config.model.dtype = options.dtype;
  config.optimizer.lr = 1e-4;
  const Dataset data(config.data, config.run.seed);

  struct Level {
    std::unique_ptr<Training> training;
    std::vector<double> cpu, wall, reduce_wait, gather_wait;
    int64_t sent = 0, planned = 0;  // bytes that this rank sent in the last step, and that it was planned to hold
    double loss = 0;
  };
  std::array<Level, kLevels> levels;
  for (int64_t level = 0; level < kLevels; ++level) {
    config.optimizer.shard = level;
    Level& l = levels[static_cast<size_t>(level)];
    l.training = std::make_unique<Training>(config, world, data, at::kCPU);
    l.training->step();  // touches memory for the first time
    l.planned =
        plan_memory(config, check_training(config, world.size()), make_sharding(config, world.size(), world.size()),
                    world.size(), world.rank(), RanksAre::kProcesses)
            .total();
  }
  for (int64_t round = 0; round < options.rounds; ++round) {
    // Each round begins with another level.
    for (int64_t turn = 0; turn < kLevels; ++turn) {
      Level& l = levels[static_cast<size_t>((round + turn) % kLevels)];
      const Communicator* state = l.training->model_state().sharers();
      const CommStats before = state != nullptr ? state->stats() : CommStats();
      world.barrier({"a round of the benchmark", round, "round"});
      const double cpu = cpu_seconds(), wall = wall_seconds();
      l.loss = l.training->step().loss;
      l.cpu.push_back(over_all_ranks(world, cpu_seconds() - cpu, round));
      l.wall.push_back(wall_seconds() - wall);
      const CommStats after = state != nullptr ? state->stats() : CommStats();
      l.sent = after.collective_bytes_sent - before.collective_bytes_sent;
      l.reduce_wait.push_back(after.reduce_wait_seconds - before.reduce_wait_seconds);
      l.gather_wait.push_back(after.gather_wait_seconds - before.gather_wait_seconds);
    }
  }

  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), "a Llama of %lld parameters in %s, %lld tokens, %d ranks of one thread",
                static_cast<long long>(levels[0].training->model().parameters().count()), options.dtype.c_str(),
                static_cast<long long>(options.batch * options.context), world.size());
  const std::string settings = text.data();
  const double least = *std::min_element(levels[0].cpu.begin(), levels[0].cpu.end());
  const double layer = least / world.size() / static_cast<double>(options.layers);
  std::vector<BenchRatio> ratios;
  for (size_t level = 1; level < kLevels; ++level) {
    const std::optional<double> goal = layer >= kLayer ? std::optional(kGoals[level]) : std::nullopt;
    ratios.push_back(
        ratio_of("shard/level " + std::to_string(level), settings, levels[level].cpu, levels[0].cpu, goal));
  }
  if (world.rank() != 0) return ratios;
  std::snprintf(text.data(), text.size(), "%s; least of %lld steps; %.0f ms a layer and rank\n\n", settings.c_str(),
                static_cast<long long>(options.rounds), 1e3 * layer);
  out << text.data()
      << "  level  CPU s a step   over level 0   quartiles       goal   s a step   reduce  gather   MB sent   MB "
         "planned\n";
  nlohmann::json json = {{"bench", "shard"}, {"ranks", world.size()}, {"layer_seconds", layer}};
  for (size_t level = 0; level < kLevels; ++level) {
    const Level& l = levels[level];
    const double cpu = *std::min_element(l.cpu.begin(), l.cpu.end());
    const BenchRatio ratio = level == 0 ? ratio_of("", "", l.cpu, l.cpu) : ratios[level - 1];
    const double wall = median(l.wall), reduce = median(l.reduce_wait), gather = median(l.gather_wait);
    std::snprintf(text.data(), text.size(),
                  "  %5zu  %12.4f   %12.3f   %.3f to %.3f   %4.2f   %8.3f   %6.3f  %6.3f   %7.2f   %10.1f\n", level,
                  cpu, ratio.ratio, ratio.low, ratio.high, kGoals[level], wall, reduce, gather,
                  static_cast<double>(l.sent) / 1e6, static_cast<double>(l.planned) / 1e6);
    out << text.data();
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

}  // namespace annulus
