// `annulus bench faults`: what the watch of ranks (launcher/launch/host_watch.h) costs a training step: the beats that
// a rank writes, measured by steps with them and steps without them in turn and counted by the beats of a step, and the
// looks of the host's watch beside it.
#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
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
#include "runtime/training/training.h"

namespace annulus {
namespace {

constexpr int64_t kBeats = 100'000, kLooks = 200;
constexpr double kSecondsBetweenLooks = 1;  // with the default of launch --stuck-after

class FaultsBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--repeats,--rounds", rounds_, "pairs of a step with beats and one without");
    app.footer("Example:\n  ./annulus launch -n 2 bench faults");
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
    BeatPage* const of_launch = beat_page();  // null without a launcher
    BeatPage own;
    BeatPage& page = of_launch != nullptr ? *of_launch : own;
    set_beat_page(&page);
    training.step();  // touches memory for the first time
    const uint64_t before = page.own + page.others;
    training.step();
    const auto beats = static_cast<double>(page.own + page.others - before);

    std::vector<double> with, without, wall;
    for (int64_t round = 0; round < rounds_; ++round) {
      for (const bool on : {round % 2 == 0, round % 2 != 0}) {  // each goes first as often
        set_beat_page(on ? &page : nullptr);
        const double begin = wall_seconds();
        add_cost(on ? with : without, true, [&] { training.step(); });
        if (on) wall.push_back(wall_seconds() - begin);
      }
    }
    const double of_beat = (spans_cost(&page) - spans_cost(nullptr)) / 2;  // a span has two
    set_beat_page(of_launch);
    HostWatch watch(30, getppid());
    watch.add(world.rank(), getpid(), -1);
    const double of_look = least_seconds([&] {
                             for (int64_t i = 0; i < kLooks; ++i) watch.look(0);
                           }) /
                           kLooks;

    const auto all = over_ranks(world, {beats, of_beat, of_look}, ReduceOp::kMax);
    const double step = over_ranks(world, {least(wall)}, ReduceOp::kMin)[0];
    if (world.rank() != 0) return {};
    const double counted = all[0] * all[1] / step, measured = median(with) / median(without);
    out << line("a step of %s, %lld ms at least: %lld beats of %.1f ns of CPU time each\n", ranks_text(world),
                static_cast<int64_t>(1e3 * step), static_cast<int64_t>(all[0]), 1e9 * all[1])
        << line("  %-46s%8.4f %%\n", "beats times their cost, over a step", 100 * counted)
        << line("  %-46s%8.4f\n", "CPU seconds with beats over without", measured)
        << line("  (medians of %lld pairs in turn)\n", rounds_)
        << line("  %-46s%8.4f %%\n\n", "the watch of a host, of one core for each rank",
                100 * all[2] / kSecondsBetweenLooks)
        << nlohmann::json({{"bench", "faults"},
                           {"beats", all[0]},
                           {"nanoseconds_per_beat", 1e9 * all[1]},
                           {"share_of_step", counted},
                           {"with_over_without", measured},
                           {"seconds_per_look", all[2]}})
               .dump()
        << std::endl;
    return {ratio_of("faults/with beats over without", "a Llama of 4 layers of 128, context 1024, " + ranks_text(world),
                     with, without, 1.01)};
  }

 private:
  static std::string ranks_text(const Communicator& world) { return counted(world.size(), "rank"); }

  static double spans_cost(BeatPage* page) {
    set_beat_page(page);
    return least_seconds([] {
             for (int64_t i = 0; i < kBeats; ++i) {
               const TraceSpan span(TraceKind::kCompute, "span", "step 1, attention, layer 0", i);
             }
           }) /
           kBeats;
  }

  int64_t rounds_ = 20;
};

}  // namespace

std::unique_ptr<Benchmark> make_faults_benchmark() { return std::make_unique<FaultsBenchmark>(); }

}  // namespace annulus
