// `annulus bench plan`: predicted against measured CPU time of attention over 2 and 4 ranks, for eight patterns and
// three schedules, and how far the schedule that `auto` chooses is from the best of them.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/choice.h"
#include "attention/plan/layout.h"
#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/calibration.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr double kNear = 0.2;        // a prediction should be within this share of what is measured,
constexpr double kNearShare = 0.9;   // so many of them,
constexpr double kBestWithin = 1.1;  // and auto's schedule within this factor of the best by hand

struct TimedPattern {
  const char* name;
  std::string text;
  LayoutKind layout;
};

// Patterns of rows of `n` tokens.
std::vector<TimedPattern> timed_patterns(int64_t n) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  const std::string documents = "[" + number(n / 2) + ", " + number(n / 4) + ", " + number(n - n / 2 - n / 4) + "]";
  return {
      {"full", "{ kind = \"full\" }", LayoutKind::kContiguous},
      {"causal", "{ kind = \"causal\" }", LayoutKind::kZigzag},
      {"window", "{ kind = \"window\", left = " + number(n / 8) + ", right = 0 }", LayoutKind::kContiguous},
      {"sinks", "{ kind = \"window\", left = " + number(n / 8) + ", right = 0, sink_tokens = 4 }",
       LayoutKind::kContiguous},
      {"documents", "{ kind = \"documents\", documents = " + documents + ", causal = true }", LayoutKind::kZigzag},
      {"dilated",
       "{ kind = \"dilated\", segment_lengths = [" + number(n / 4) + ", " + number(n) + "], dilation_rates = [1, 4] }",
       LayoutKind::kContiguous},
      {"strided", "{ kind = \"blocks\", map = \"strided\", block = 128, window_blocks = 1, stride = 4 }",
       LayoutKind::kContiguous},
      {"bigbird",
       "{ kind = \"blocks\", map = \"bigbird\", block = 128, window_blocks = 1, global_blocks = 1, "
       "random_blocks = 2 }",
       LayoutKind::kContiguous}};
}

// One way to run one request over the ranks of a communicator.
struct TimedCall {
  PlanRequest request;
  double predicted = 0;  // CPU seconds of all ranks, forward and backward
  std::unique_ptr<ExecutorCall> call;
  std::vector<double> costs;
};

// CPU seconds of all ranks: what they compute, and what both ends of their transfers take, without waiting.
double predicted_cpu(const PlanRequest& request, const RowBytes& bytes) {
  double sum = 0;
  const MachineProfile& machine = request.terms->machine;
  for (const bool backward : {false, true}) {
    std::vector<RankSteps> all;
    for_each_program(request, [&](const Program& program) {
      all.push_back({program.rank, step_costs(program, backward, machine, bytes)});
    });
    for (const RankTime& time : sweep(all, request.ranks, machine)) sum += time.compute + time.add + time.busy;
  }
  return sum;
}

class PlanBenchmark : public Benchmark {
 public:
  void declare(CLI::App& app) override {
    add(app, "--machine", machine_, "the profile to predict by (default: it is measured first)")->type_name("FILE");
    add(app, "--length", length_, "tokens of the sequence");
    add(app, "--heads", shape_.heads, "query heads");
    add(app, "--kv-heads", shape_.kv_heads, "kv heads");
    add(app, "--head-dim", head_dim_, "head size");
    add(app, "--rounds,--repeats", rounds_, "rounds that count");
    app.add_option("--threads", threads_, "ranks that are threads of this process, not processes")
        ->check(CLI::Range(2, 64));
    app.footer(
        "Examples:\n  ./annulus bench plan\n"
        "  ./annulus bench plan --threads 4 --machine ./machine.toml --length 4096");
  }

  std::string request() const override {
    return line("%lld %lld %lld %lld %lld %s", length_, shape_.heads, shape_.kv_heads, head_dim_, rounds_, machine_);
  }

  std::optional<int> run_alone(std::ostream& out) override {
    if (threads_ == 0) return std::nullopt;
    run_ranks(threads_, [&](Communicator& world) { compare(world, out, thread_cpu_seconds); });
    return 0;
  }

  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    return compare(world, out, cpu_seconds);
  }

 private:
  std::vector<BenchRatio> compare(Communicator& world, std::ostream& out, const std::function<double()>& clock) const {
    if (world.size() < 2) {
      throw Error(ErrorKind::kUsage, "bench", "bench plan needs two or more ranks: start them, or give --threads 4");
    }
    const bool first = world.rank() == 0;
    CalibrationSettings settings;
    settings.head_dim = head_dim_;
    const MachineProfile machine =
        machine_.empty() ? calibrate(world, settings, clock) : find_machine(machine_, "--machine");
    const TermsPointer terms =
        PlanTerms{.machine = machine, .head_dim = head_dim_, .element_bytes = 4, .backward = true, .memory = 0};
    if (first) {
      out << line(
                 "forward and backward, %lld tokens, %lld:%lld heads of %lld, fp32; CPU seconds of all ranks, median "
                 "of "
                 "%lld turns\nmachine: %s\n\n",
                 length_, shape_.heads, shape_.kv_heads, head_dim_, rounds_, machine.source)
          << "  ranks  pattern    schedule             predicted   measured   ratio\n";
    }
    std::vector<BenchRatio> ratios;
    int near = 0, all = 0;
    double farthest = 1;
    for (int ranks = 2; ranks <= std::min(4, world.size()); ranks += 2) {
      const std::unique_ptr<Communicator> comm = world.split(world.rank() < ranks ? 0 : -1, world.rank());
      for (const TimedPattern& pattern : timed_patterns(length_)) {
        std::vector<TimedCall> calls = make_calls(comm.get(), pattern, ranks, terms);
        for (int64_t turn = -1; turn < rounds_; ++turn) {
          for (TimedCall& call : calls) measure(world, call, clock, turn >= 0);
        }
        if (!first) continue;
        double best = median(calls[0].costs), chosen = 0;
        for (const TimedCall& call : calls) {
          const double measured = median(call.costs), ratio = call.predicted / measured;
          const bool is_auto = &call == &calls.back();
          if (is_auto) chosen = measured;
          best = std::min(best, measured);
          near += std::abs(ratio - 1) <= kNear;
          ++all;
          const std::string name = std::string(to_string(call.request.schedule));
          out << line("  %5lld  %-9s  %-18s  %10.4f  %9.4f  %6.2f\n", ranks, pattern.name,
                      name + (is_auto ? " (auto)" : ""), call.predicted, measured, ratio);
        }
        farthest = std::max(farthest, chosen / best);
        ratios.push_back(ratio_of(line("plan/%s, %lld ranks: auto over the best", pattern.name, ranks), request(),
                                  calls.back().costs, best_of(calls).costs, kBestWithin));
      }
    }
    if (first) {
      out << line(
                 "\n%lld of %lld predictions within %.0f %% of what was measured (goal: %.0f %%: %s); auto at most "
                 "%.2f times "
                 "the best by hand (goal: %.2f: %s)\n",
                 near, all, 100 * kNear, 100 * kNearShare, met_or_missed(near >= kNearShare * all), farthest,
                 kBestWithin, met_or_missed(farthest <= kBestWithin))
          << std::flush;
    }
    return ratios;
  }

  static const TimedCall& best_of(const std::vector<TimedCall>& calls) {
    return *std::min_element(calls.begin(), calls.end(),
                             [](const TimedCall& a, const TimedCall& b) { return median(a.costs) < median(b.costs); });
  }

  // The schedules by hand, and as the last one what auto chooses.
  std::vector<TimedCall> make_calls(Communicator* comm, const TimedPattern& pattern, int ranks,
                                    const TermsPointer& terms) const {
    PlanRequest request;
    request.shape = shape_;
    request.shape.q_len = request.shape.k_len = length_;
    request.pattern = parse_pattern(pattern.text, pattern.name);
    request.layout = pattern.layout;
    request.ranks = ranks;
    request.terms = terms;
    std::vector<TimedCall> calls;
    for (const ScheduleKind schedule :
         {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast, ScheduleKind::kAuto}) {
      request.schedule = schedule;
      TimedCall& timed = calls.emplace_back();
      timed.request = resolve_schedule(request);
      timed.predicted = predicted_cpu(timed.request, {head_dim_, 4});
      if (comm == nullptr) continue;
      AttentionShape mine = request.shape;
      mine.q_len = query_layout(request).count(comm->rank());
      mine.k_len = key_layout(request).count(comm->rank());
      AttentionCall call;
      call.request = timed.request;
      call.comm = comm;
      call.label = "bench plan";
      timed.call = std::make_unique<ExecutorCall>(random_inputs(mine, head_dim_, at::kFloat), std::move(call));
    }
    return calls;
  }

  // Collective over the world.
  static void measure(Communicator& world, TimedCall& timed, const std::function<double()>& clock, bool counted) {
    world.barrier({"bench", 0});
    const double begin = clock();
    if (timed.call) timed.call->run();
    const double cost = timed.call ? clock() - begin : 0;
    const double sum = over_ranks(world, {cost}, ReduceOp::kSum)[0];
    if (counted) timed.costs.push_back(sum);
  }

  AttentionShape shape_ = {1, 4, 4, 0, 0, 0};
  int64_t length_ = 4096, head_dim_ = 64, rounds_ = 5;
  int threads_ = 0;
  std::string machine_;
};

}  // namespace

std::unique_ptr<Benchmark> make_plan_benchmark() { return std::make_unique<PlanBenchmark>(); }

}  // namespace annulus
