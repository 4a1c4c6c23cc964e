// Implements train.h.
#include "benchmarks/train.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "benchmarks/operator_clock.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "data/dataset.h"
#include "training/training.h"

namespace annulus {
namespace {

// The baseline's CPU seconds for 1,000 tokens.
double run_baseline(const std::string& command) {
  const auto refuse = [&](const std::string& what) {
    return Error(ErrorKind::kUnavailable, "bench",
                 "the baseline `" + command + "` " + what +
                     "; expected a command whose last line is a JSON object with \"cpu_s_per_1k_tok\"");
  };
  std::FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw refuse("cannot be started");
  std::string text;
  std::array<char, 4096> piece{};
  for (size_t n; (n = std::fread(piece.data(), 1, piece.size(), pipe)) > 0;) text.append(piece.data(), n);
  if (const int status = pclose(pipe); status != 0) throw refuse("failed");
  while (text.ends_with('\n')) text.pop_back();
  const nlohmann::json json =
      nlohmann::json::parse(text.substr(text.rfind('\n') + 1), nullptr, /*allow_exceptions=*/false);
  const auto found = json.is_object() ? json.find("cpu_s_per_1k_tok") : json.end();
  if (!json.is_object() || found == json.end() || !found->is_number() || !(found->get<double>() > 0)) {
    throw refuse("printed something else");
  }
  return found->get<double>();
}

}  // namespace

std::vector<BenchRatio> run_train_bench(const TrainBenchOptions& options, std::ostream& out) {
  at::set_num_threads(options.threads);
  Config config;
  config.device = "cpu";
  config.run.steps = options.steps + 1;
  config.data.train = {"python-sources"};
  config.data.max_bytes = 64 << 20;
  config.data.context = options.context;
  config.data.batch = options.batch;
  config.model.layers = options.layers;
  config.model.dim = options.dim;
  config.model.heads = options.heads;
  config.model.kv_heads = options.kv_heads;
  config.model.ffn = options.ffn;
  config.optimizer.lr = 1e-4;
  const Dataset data(config.data, config.run.seed);
  const std::shared_ptr<Communicator> world = make_self_communicator();
  Training training(config, *world, data, at::kCPU);
  training.step();  // touches memory for the first time

  struct Turn {
    double cpu, wall, products, attention;
  };
  std::vector<Turn> turns;
  for (int64_t i = 0; i < options.steps; ++i) {
    // The profiling hooks cost less than a thousandth of a step, so there are no steps without them.
    const OperatorClock clock;
    const double cpu = cpu_seconds(), wall = wall_seconds();
    training.step();
    turns.push_back({cpu_seconds() - cpu, wall_seconds() - wall, clock.products(), clock.attention()});
  }
  const Turn best =
      *std::min_element(turns.begin(), turns.end(), [](const Turn& a, const Turn& b) { return a.cpu < b.cpu; });
  const double tokens = static_cast<double>(options.batch * options.context);
  const double flops = training.flops_per_token() * tokens;
  // The hooks see only the calling thread, so the shares are known for one thread only.
  const bool whole = options.threads == 1;
  const double outside = 1 - (best.products + best.attention) / best.cpu;

  std::array<char, 512> table{};
  std::snprintf(table.data(), table.size(),
                "%lld parameters, context %lld, %lld rows, %d thread%s; least of %lld steps\n\n"
                "  tokens per CPU second    %10.1f\n"
                "  CPU seconds per 1k tokens%10.4f\n"
                "  GFLOP per CPU second     %10.1f\n"
                "  tokens per second        %10.1f\n",
                static_cast<long long>(training.model().parameters().count()), static_cast<long long>(options.context),
                static_cast<long long>(options.batch), options.threads, options.threads == 1 ? "" : "s",
                static_cast<long long>(options.steps), tokens / best.cpu, 1000 * best.cpu / tokens,
                flops / best.cpu / 1e9, tokens / best.wall);
  out << table.data();
  nlohmann::json json = {{"bench", "train"},
                         {"parameters", training.model().parameters().count()},
                         {"threads", options.threads},
                         {"batch", options.batch},
                         {"context", options.context},
                         {"tokens_per_cpu_second", tokens / best.cpu},
                         {"cpu_seconds_per_1k_tokens", 1000 * best.cpu / tokens},
                         {"gflop_per_cpu_second", flops / best.cpu / 1e9},
                         {"tokens_per_second", tokens / best.wall}};
  if (whole) {
    std::snprintf(
        table.data(), table.size(),
        "  share in matrix products %10.3f\n  share in attention       %10.3f\n  share outside both       %10.3f\n",
        best.products / best.cpu, best.attention / best.cpu, outside);
    out << table.data();
    json["share_products"] = best.products / best.cpu;
    json["share_attention"] = best.attention / best.cpu;
    json["share_outside"] = outside;
  }
  std::vector<BenchRatio> ratios;
  std::snprintf(table.data(), table.size(), "a Llama of %lld parameters, context %lld, %lld rows, %d thread%s",
                static_cast<long long>(training.model().parameters().count()), static_cast<long long>(options.context),
                static_cast<long long>(options.batch), options.threads, options.threads == 1 ? "" : "s");
  const std::string settings = table.data();
  std::vector<double> all, rest, costs;
  for (const Turn& t : turns) {
    all.push_back(t.cpu);
    rest.push_back(t.cpu - t.products - t.attention);
    costs.push_back(1000 * t.cpu / tokens);
  }
  if (whole) ratios.push_back(ratio_of("train/share outside products and attention", settings, rest, all));
  if (!options.baseline.empty()) {
    const double baseline = run_baseline(options.baseline);
    ratios.push_back(ratio_of("train/over the baseline", settings + "; baseline: " + options.baseline, costs,
                              std::vector<double>(costs.size(), baseline), 1.0));
    std::snprintf(table.data(), table.size(), "  CPU seconds over baseline%10.3f\n", ratios.back().ratio);
    out << table.data();
    json["over_baseline"] = ratios.back().ratio;
  }
  out << "\n" << json.dump() << std::endl;
  return ratios;
}

}  // namespace annulus
