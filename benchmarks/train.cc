// `annulus bench train`: tokens trained for each CPU second on one rank, and the share of CPU time spent outside matrix
// products and attention.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "benchmarks/small_llama.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/data/dataset.h"
#include "runtime/training/training.h"

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

class TrainBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--repeats,--rounds", steps_, "steps that count");
    add(app, "--threads", threads_, "threads");
    add(app, "--baseline", baseline_, kBaselineHelp)->type_name("COMMAND");
    app.footer("Example:\n  ./annulus bench train");
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(threads_);
    const Config config = config_of({.dim = 256, .ffn = 688, .batch = 4, .steps = steps_ + 1, .text_bytes = 64 << 20});
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    Training training(config, world, data, at::kCPU);
    training.step();  // touches memory for the first time

    std::vector<double> cpu, wall, outside;  // of each step
    double products = 0, attention = 0;      // of the step with the least CPU seconds
    for (int64_t i = 0; i < steps_; ++i) {
      // The profiling hooks cost less than a thousandth of a step, so there are no steps without them.
      const OperatorsSeen seen;
      const double cpu_begin = cpu_seconds(), wall_begin = wall_seconds();
      training.step();
      cpu.push_back(cpu_seconds() - cpu_begin);
      wall.push_back(wall_seconds() - wall_begin);
      outside.push_back(cpu.back() - seen.product_seconds() - seen.attention_seconds());
      if (cpu.back() > least(cpu)) continue;
      products = seen.product_seconds();
      attention = seen.attention_seconds();
    }
    const size_t best = static_cast<size_t>(std::min_element(cpu.begin(), cpu.end()) - cpu.begin());
    const auto tokens = static_cast<double>(config.data.batch * config.data.context.longest());
    const double gflop = training.flops_per_token() * tokens / 1e9;
    // A step with several threads is not divided, because the hooks see only the threads that call operators.
    const bool whole = threads_ == 1;

    const int64_t parameters = training.model().parameters().count();
    const std::string sizes = line("%lld parameters, context %lld, %s, %s", parameters, config.data.context.longest(),
                                   counted(config.data.batch, "row"), counted(threads_, "thread"));
    out << sizes << line("; least of %lld steps\n\n", steps_);
    nlohmann::json json = {{"bench", "train"},
                           {"parameters", parameters},
                           {"threads", threads_},
                           {"batch", config.data.batch},
                           {"context", config.data.context.longest()}};
    const auto report = [&](const char* label, int digits, const char* key, double value) {
      out << line("  %-25s%10.*f\n", label, Width{digits}, value);
      json[key] = value;
    };
    report("tokens per CPU second", 1, "tokens_per_cpu_second", tokens / cpu[best]);
    report("CPU seconds per 1k tokens", 4, "cpu_seconds_per_1k_tokens", 1000 * cpu[best] / tokens);
    report("GFLOP per CPU second", 1, "gflop_per_cpu_second", gflop / cpu[best]);
    report("tokens per second", 1, "tokens_per_second", tokens / wall[best]);
    const std::string settings = "a Llama of " + sizes;
    std::vector<BenchRatio> ratios;
    if (whole) {
      report("share in matrix products", 3, "share_products", products / cpu[best]);
      report("share in attention", 3, "share_attention", attention / cpu[best]);
      report("share outside both", 3, "share_outside", outside[best] / cpu[best]);
      ratios.push_back(ratio_of("train/share outside products and attention", settings, outside, cpu));
    }
    if (!baseline_.empty()) {
      std::vector<double> costs;
      for (const double seconds : cpu) costs.push_back(1000 * seconds / tokens);
      ratios.push_back(ratio_of("train/over the baseline", settings + "; baseline: " + baseline_, costs,
                                std::vector<double>(costs.size(), run_baseline(baseline_)), 1.0));
      report("CPU seconds over baseline", 3, "over_baseline", ratios.back().ratio);
    }
    out << "\n" << json.dump() << std::endl;
    return ratios;
  }

 private:
  int64_t steps_ = 5;
  int threads_ = 1;
  std::string baseline_;
};

}  // namespace

std::unique_ptr<Benchmark> make_train_benchmark() { return std::make_unique<TrainBenchmark>(); }

}  // namespace annulus
