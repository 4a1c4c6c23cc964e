// `annulus bench trace`: what a training step costs that says what it does: the recorder of operations
// (common/trace/recorder.h) while no trace is asked for, measured by steps with it and steps without it in turn, and
// counted by the records of a step; and the metrics of all ranks (runtime/training/rank_metrics.h), part by part.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "common/trace/recorder.h"
#include "runtime/data/dataset.h"
#include "runtime/training/rank_metrics.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr int64_t kSpans = 100'000;
constexpr int64_t kExchanges = 200, kOthers = 5;  // the numbers of a step's own result

// Seconds that the metrics of ranks add to a step; of those that ranks differ in, the most of one.
struct MetricsCost {
  double sample = 0;    // a rank takes its numbers
  double asked = 0;     // the same where it asks the kernel, the pool and the training as well: at most once a second
  double exchange = 0;  // the exchange of a step's results carries them, too
  double line = 0;      // rank 0 looks for slow ranks, and makes what a line of metrics.jsonl has of them

  double of_step(double seconds) const { return sample + exchange + line + (asked - sample) * std::min(1.0, seconds); }
};

// Collective. Every step counts as one with a line, and as long enough to be looked at by itself.
MetricsCost cost_of_metrics(Config config, Communicator& world, Training& training) {
  config.run.slow_seconds = 0;
  RankMetrics metrics(config, world, training, at::kCPU);
  TrainingClock clock = TrainingClock::now(world, training);
  std::vector<Training::Carried> all(static_cast<size_t>(world.size()));
  const double asked = least_seconds([&] {
    clock.time += 1;
    all[0] = metrics.sample(clock);
  });
  // The time of the last sample lies ahead, so these do not ask.
  const double sample = least_seconds([&] { all[0] = metrics.sample(TrainingClock::now(world, training)); });
  const auto gather = [&](int64_t numbers) {
    const at::Tensor own = at::zeros({numbers}, at::kDouble);
    at::Tensor of_all = at::zeros({world.size(), numbers}, at::kDouble);
    world.barrier({"exchanging numbers", 0});
    const double begin = wall_seconds();
    world.all_gather(of_all, own, {"exchanging numbers", 0});
    return wall_seconds() - begin;
  };
  std::vector<double> without, with;
  for (int64_t i = 0; i < kExchanges && world.size() > 1; ++i) {
    without.push_back(gather(kOthers));
    with.push_back(gather(kOthers + int64_t{kCarriedNumbers}));
  }
  int64_t step = 0;
  const double line = least_seconds([&] {
    for (size_t rank = 0; rank < all.size(); ++rank) {
      all[rank] = all[0];
      for (double& number : all[rank]) number += static_cast<double>(step + 1);
    }
    metrics.step(++step, all);
    MetricsWriter::Fields fields;
    metrics.add_fields(fields);
  });
  const double exchange = world.size() > 1 ? std::max(0.0, median(with) - median(without)) : 0;
  const auto most = over_ranks(world, {sample, asked, exchange, line}, ReduceOp::kMax);
  return {most[0], most[1], most[2], most[3]};
}

class TraceBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--repeats,--rounds", rounds_, "pairs of a step with the recorder and one without");
    app.footer("Example:\n  ./annulus launch -n 2 bench trace");
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(1);
    const Config config = config_of({.layers = 4,
                                     .dim = 128,
                                     .heads = 4,
                                     .kv_heads = 2,
                                     .ffn = 344,
                                     .context = 1024,
                                     .batch = 1,
                                     .steps = 2 * rounds_ + 2,
                                     .text_bytes = 1 << 20});
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    Training training(config, world, data, at::kCPU);
    const TraceThread thread(world.rank(), kMainThread);
    training.step();  // touches memory for the first time
    TraceWindow window(world.rank());
    training.step();
    int64_t records = 0;
    for (const TracedThread& of : window.finish().threads) records += static_cast<int64_t>(of.events.size());

    std::vector<double> with, without, wall;
    for (int64_t round = 0; round < rounds_; ++round) {
      for (const bool on : {round % 2 == 0, round % 2 != 0}) {  // each goes first as often
        set_tracing(on);
        const double begin = wall_seconds();
        add_cost(on ? with : without, true, [&] { training.step(); });
        if (on) wall.push_back(wall_seconds() - begin);
      }
    }
    set_tracing(true);
    const double of_span = least_seconds([] {
                             for (int64_t i = 0; i < kSpans; ++i) {
                               const TraceSpan span(TraceKind::kCompute, "span", "step 1, attention, layer 0", i);
                             }
                           }) /
                           kSpans;
    // The longest time that one rank spends on its records, over the shortest step.
    const auto all = over_ranks(world, {static_cast<double>(records) * of_span, of_span}, ReduceOp::kMax);
    const double step = over_ranks(world, {least(wall)}, ReduceOp::kMin)[0];
    const double counted = all[0] / step, measured = median(with) / median(without);
    out << line("a step of %s, %lld ms at least: %lld records of %.0f ns of CPU time each\n", ranks_text(world),
                static_cast<int64_t>(1e3 * step), records, 1e9 * all[1])
        << line("  %-46s%8.4f %%\n", "records times their cost, over a step", 100 * counted)
        << line("  %-46s%8.4f\n", "CPU seconds with the recorder over without", measured)
        << line("  (medians of %lld pairs in turn)\n\n", rounds_);
    const MetricsCost metrics = cost_of_metrics(config, world, training);
    const double share = metrics.of_step(step) / step;
    out << line("metrics of ranks, microseconds: a rank's numbers %.1f, once a second %.1f; the wider exchange %.1f;\n",
                1e6 * metrics.sample, 1e6 * metrics.asked, 1e6 * metrics.exchange)
        << line("  rank 0's part of a step that is logged %.1f\n", 1e6 * metrics.line)
        << line("  %-46s%8.4f %%\n\n", "together, over a step that is logged", 100 * share)
        << nlohmann::json({{"bench", "trace"},
                           {"records", records},
                           {"nanoseconds_per_record", 1e9 * all[1]},
                           {"share_of_step", counted},
                           {"with_over_without", measured},
                           {"metrics_sample_seconds", metrics.sample},
                           {"metrics_asked_seconds", metrics.asked},
                           {"metrics_exchange_seconds", metrics.exchange},
                           {"metrics_line_seconds", metrics.line},
                           {"metrics_share_of_step", share}})
               .dump()
        << std::endl;
    return {ratio_of("trace/with the recorder over without",
                     "a Llama of 4 layers of 128, context 1024, " + ranks_text(world), with, without, 1.005)};
  }

 private:
  static std::string ranks_text(const Communicator& world) { return counted(world.size(), "rank"); }

  int64_t rounds_ = 20;
};

}  // namespace

std::unique_ptr<Benchmark> make_trace_benchmark() { return std::make_unique<TraceBenchmark>(); }

}  // namespace annulus
