// `annulus bench trace` and `bench faults`: what a training step costs that says what it does. Trace: the recorder of
// operations (common/trace/recorder.h) while no trace is asked for, and the metrics of all ranks
// (runtime/training/rank_metrics.h), part by part. Faults: the beats that a rank writes for the watch of ranks, and the
// looks of that watch (launcher/launch/host_watch.h). Recorder and beats are measured by steps with them and steps
// without them in turn, and counted: their number in a step, times the cost of one.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "common/trace/beat.h"
#include "common/trace/recorder.h"
#include "launcher/launch/host_watch.h"
#include "runtime/data/dataset.h"
#include "runtime/training/rank_metrics.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr int64_t kSpans = 100'000, kLooks = 200;
constexpr double kSecondsBetweenLooks = 1;        // with the default of launch --stuck-after
constexpr int64_t kExchanges = 200, kOthers = 5;  // the numbers of a step's own result

// CPU seconds of a span of the recorder, which writes a record and two beats.
double seconds_of_span() {
  return least_seconds([] {
           for (int64_t i = 0; i < kSpans; ++i) {
             const TraceSpan span(TraceKind::kCompute, "span", "step 1, attention, layer 0", i);
           }
         }) /
         kSpans;
}

// Training steps of a small Llama, which are measured with something and without it.
class StepsInTurn {
 public:
  StepsInTurn(Communicator& world, int64_t rounds)
      : config(config_of({.dim = 128, .ffn = 344, .steps = 2 * rounds + 2})),
        data(config.data, config.run.seed, config.model.vocab),
        training(config, world, data, at::kCPU),
        world_(world),
        rounds_(rounds) {
    training.step();  // touches memory for the first time
  }

  // Collective. `turn` turns it on or off. Returns the seconds of the shortest step with it.
  double measure(const std::function<void(bool on)>& turn) {
    std::vector<double> wall;
    for (int64_t round = 0; round < rounds_; ++round) {
      for (const bool on : {round % 2 == 0, round % 2 != 0}) {  // each goes first as often
        turn(on);
        const double begin = wall_seconds();
        add_cost(on ? with_ : without_, true, [&] { training.step(); });
        if (on) wall.push_back(wall_seconds() - begin);
      }
    }
    return over_ranks(world_, {least(wall)}, ReduceOp::kMin)[0];
  }

  // Prints what was measured and what is counted: `number` records or beats of `seconds` each. Returns their share of a
  // step of `step` seconds.
  double print(std::ostream& out, double step, const char* things, double number, double seconds) const {
    out << line("a step of %s, %lld ms at least: %lld %s of %.1f ns of CPU time each\n", ranks_text(),
                static_cast<int64_t>(1e3 * step), static_cast<int64_t>(number), things, 1e9 * seconds)
        << line("  %-46s%8.4f %%\n", std::string(things) + " times their cost, over a step",
                100 * number * seconds / step)
        << line("  %-46s%8.4f\n", std::string("CPU seconds with ") + things + " over without", with_over_without())
        << line("  (medians of %lld pairs in turn)\n", rounds_);
    return number * seconds / step;
  }
  double with_over_without() const { return median(with_) / median(without_); }
  BenchRatio ratio(const char* name, double goal) const { return ratio_of(name, settings(), with_, without_, goal); }
  std::string settings() const { return "a Llama of 4 layers of 128, context 1024, " + ranks_text(); }

  Config config;
  const Dataset data;
  Training training;

 private:
  std::string ranks_text() const { return counted(world_.size(), "rank"); }

  Communicator& world_;
  const int64_t rounds_;
  std::vector<double> with_, without_;  // CPU seconds of steps
};

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
    StepsInTurn steps(world, rounds_);
    const TraceThread thread(world.rank(), kMainThread);
    TraceWindow window(world.rank());
    steps.training.step();
    int64_t records = 0;
    for (const TracedThread& of : window.finish().threads) records += static_cast<int64_t>(of.events.size());
    const double step = steps.measure(set_tracing);
    set_tracing(true);
    // The most records of a rank, and the longest time that one takes.
    const auto most = over_ranks(world, {static_cast<double>(records), seconds_of_span()}, ReduceOp::kMax);
    const MetricsCost metrics = cost_of_metrics(steps.config, world, steps.training);
    if (world.rank() != 0) return {};
    const double counted = steps.print(out, step, "records", most[0], most[1]);
    const double share = metrics.of_step(step) / step;
    out << line(
               "\nmetrics of ranks, microseconds: a rank's numbers %.1f, once a second %.1f; the wider exchange "
               "%.1f;\n",
               1e6 * metrics.sample, 1e6 * metrics.asked, 1e6 * metrics.exchange)
        << line("  rank 0's part of a step that is logged %.1f\n", 1e6 * metrics.line)
        << line("  %-46s%8.4f %%\n\n", "together, over a step that is logged", 100 * share)
        << nlohmann::json({{"bench", "trace"},
                           {"records", static_cast<int64_t>(most[0])},
                           {"nanoseconds_per_record", 1e9 * most[1]},
                           {"share_of_step", counted},
                           {"with_over_without", steps.with_over_without()},
                           {"metrics_sample_seconds", metrics.sample},
                           {"metrics_asked_seconds", metrics.asked},
                           {"metrics_exchange_seconds", metrics.exchange},
                           {"metrics_line_seconds", metrics.line},
                           {"metrics_share_of_step", share}})
               .dump()
        << std::endl;
    return {steps.ratio("trace/with the recorder over without", 1.005),
            ratio_of("trace/metrics of all ranks", steps.settings(), {metrics.of_step(step)}, {step}, 0.005)};
  }

 private:
  int64_t rounds_ = 20;
};

class FaultsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--repeats,--rounds", rounds_, "pairs of a step with beats and one without");
    app.footer("Example:\n  ./annulus launch -n 2 bench faults");
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    at::set_num_threads(1);
    StepsInTurn steps(world, rounds_);
    BeatPage* const of_launch = beat_page();  // null without a launcher
    BeatPage own;
    BeatPage& page = of_launch != nullptr ? *of_launch : own;
    set_beat_page(&page);
    const uint64_t before = page.own + page.others;
    steps.training.step();
    const auto beats = static_cast<double>(page.own + page.others - before);
    const double step = steps.measure([&](bool on) { set_beat_page(on ? &page : nullptr); });
    set_beat_page(&page);
    const double with_beats = seconds_of_span();
    set_beat_page(nullptr);
    const double of_beat = (with_beats - seconds_of_span()) / 2;
    set_beat_page(of_launch);
    HostWatch watch(30, getppid());
    watch.add(world.rank(), getpid(), -1);
    const double of_look = least_seconds([&] {
                             for (int64_t i = 0; i < kLooks; ++i) watch.look(0);
                           }) /
                           kLooks;
    const auto most = over_ranks(world, {beats, of_beat, of_look}, ReduceOp::kMax);
    if (world.rank() != 0) return {};
    const double counted = steps.print(out, step, "beats", most[0], most[1]);
    out << line("  %-46s%8.4f %%\n\n", "the watch of a host, of one core for each rank",
                100 * most[2] / kSecondsBetweenLooks)
        << nlohmann::json({{"bench", "faults"},
                           {"beats", static_cast<int64_t>(most[0])},
                           {"nanoseconds_per_beat", 1e9 * most[1]},
                           {"share_of_step", counted},
                           {"with_over_without", steps.with_over_without()},
                           {"seconds_per_look", most[2]}})
               .dump()
        << std::endl;
    return {steps.ratio("faults/with beats over without", 1.01)};
  }

 private:
  int64_t rounds_ = 20;
};

}  // namespace

std::unique_ptr<Benchmark> make_trace_benchmark() { return std::make_unique<TraceBenchmark>(); }
std::unique_ptr<Benchmark> make_faults_benchmark() { return std::make_unique<FaultsBenchmark>(); }

}  // namespace annulus
