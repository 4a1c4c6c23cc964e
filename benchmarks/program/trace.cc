// `annulus bench trace`: what the recorder of operations (common/trace/recorder.h) costs a training step while no trace
// is asked for, measured by steps with it and steps without it in turn, and counted by the records of a step.
#include <ATen/Parallel.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/small_llama.h"
#include "common/trace/recorder.h"
#include "runtime/data/dataset.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr int64_t kSpans = 100'000;

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
        << line("  (medians of %lld pairs in turn)\n\n", rounds_)
        << nlohmann::json({{"bench", "trace"},
                           {"records", records},
                           {"nanoseconds_per_record", 1e9 * all[1]},
                           {"share_of_step", counted},
                           {"with_over_without", measured}})
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
