// The parts "dense", "ring" and "patterns" of `annulus bench gpu`; see gpu.h. Called by gpu.cc.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <utility>

#include "attention/oracle/oracle.h"
#include "attention/oracle/rounding.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "benchmarks/attention_calls.h"
#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "benchmarks/patterns.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr double kDenseGoal = 1 / 0.97;
constexpr double kRingGoal = 1.06;

AttentionInputs inputs_of(const GpuBenchOptions& o, int64_t length) {
  return random_inputs(shape_of(o, length), o.head_dim, at::TensorOptions().device(o.device).dtype(o.type));
}

std::string settings_of(const GpuBench& bench, int64_t length) {
  const GpuBenchOptions& o = bench.options;
  return line("%s, %lld tokens, heads %lld:%lld of %lld, %s", bench.facts.name, length, o.heads, o.kv_heads, o.head_dim,
              c10::toString(o.type));
}

AttentionCall call_of(const GpuBenchOptions& o, int64_t length, const PatternSpec& pattern) {
  AttentionCall call;
  call.request.shape = shape_of(o, length);
  call.request.pattern = pattern;
  call.kernel = o.kernel;
  call.label = "bench gpu";
  return call;
}

// The largest difference of an element of `got` from `want`, divided by the largest absolute element of `want`.
double relative_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor expected = want.to(got.device(), at::kDouble);
  const double size = expected.abs().max().item<double>();
  const double error = (got.to(at::kDouble) - expected).abs().max().item<double>();
  return size > 0 ? error / size : error;
}

// Of out, dq, dk and dv.
double largest_error(const at::Tensor& out, const AttentionGradients& got, const at::Tensor& expected_out,
                     const AttentionGradients& want) {
  return std::max({relative_error(out, expected_out), relative_error(got.dq, want.dq), relative_error(got.dk, want.dk),
                   relative_error(got.dv, want.dv)});
}

// The relative error that rounding allows results of the call against the oracle's.
double bound_of(const AttentionInputs& problem, const ExecutorCall& call) {
  const int64_t terms =
      problem.q.size(1) * (problem.q.size(2) / problem.k.size(2)) + problem.k.size(1) + problem.q.size(3);
  return rounding_bound(problem.q.scalar_type(), call.output().lse.abs().max().item<double>(), terms);
}

// Compares out, lse and dq of some query rows and heads with the fp64 oracle of these rows. Returns the largest
// relative error.
double error_of_rows(const AttentionInputs& problem, const PatternSpec& pattern, const AttentionShape& shape,
                     const ExecutorCall& call) {
  const int64_t last = shape.q_len - 1, group = shape.heads / shape.kv_heads;
  std::vector<int64_t> rows = {0, 1, last / 3, last / 2 + 1, last - 1, last};
  std::vector<int64_t> heads = {0, std::min<int64_t>(5, shape.heads - 1), shape.heads - 1};
  for (std::vector<int64_t>* list : {&rows, &heads}) {
    std::sort(list->begin(), list->end());
    list->erase(std::unique(list->begin(), list->end()), list->end());
  }
  std::vector<int64_t> kv_heads;
  for (const int64_t h : heads) kv_heads.push_back(h / group);
  const auto some = [&](const at::Tensor& t, int64_t dim, const std::vector<int64_t>& which) {
    return t.index_select(dim, at::tensor(which, at::TensorOptions().dtype(at::kLong)).to(t.device()));
  };
  const auto of_queries = [&](const at::Tensor& t) { return some(some(t, 1, rows), 2, heads); };
  const auto on_host = [](const at::Tensor& t) { return t.to(at::kCPU, at::kDouble); };
  const Count whole = count_of(pattern, shape);
  const OracleResult want =
      oracle(on_host(of_queries(problem.q)), on_host(some(problem.k, 2, kv_heads)),
             on_host(some(problem.v, 2, kv_heads)), on_host(of_queries(problem.dout)),
             1 / std::sqrt(static_cast<double>(problem.q.size(3))), [&](int64_t b, int64_t h, int64_t i, int64_t j) {
               return whole(b, heads[static_cast<size_t>(h)], rows[static_cast<size_t>(i)], j);
             });
  // In these patterns every query sees at least its own key, so no lse is infinite.
  return std::max({relative_error(of_queries(call.output().out), want.out),
                   relative_error(some(some(call.output().lse, 2, rows), 1, heads), want.lse),
                   relative_error(of_queries(call.gradients().dq), want.dq)});
}

// Returns whether the relative error `error` of `what` is at most `most`. If it is not, says so and notes that the run
// has failed.
bool right(GpuBench& bench, const std::string& what, double error, double most) {
  if (error <= most) return true;  // not if it is not a number
  const std::string wrong = what + line(" is %.3g off; at most %.3g is expected", error, most);
  bench.result.wrong += (bench.result.wrong.empty() ? "" : "; ") + wrong;
  bench.out << "  WRONG: " << wrong << std::endl;
  return false;
}

// The goals hold for GPUs only.
std::optional<double> goal_of(const GpuBenchOptions& o, double goal) {
  return o.device.is_cuda() ? std::optional(goal) : std::nullopt;
}

std::string outcome(const BenchRatio& r) {
  if (!r.invalid.empty()) return "  INVALID: " + r.invalid;
  return r.goal ? ", " + r.goal_text() : "";
}

std::string computed_instead(const TimedSide& side, const std::string& own) {
  return side.name + " computed by " + side.operators() + " instead of " + own;
}

double teraflops(double flops, double seconds) { return flops / seconds / 1e12; }

// The operator that o.kernel computes with, as far as it takes the calls.
std::string own_operator_of(const GpuBenchOptions& o) {
  const KernelChoice choice = choose_kernel(o.kernel, o.device.type(), o.type, o.head_dim, /*dropout=*/false);
  if (choice.kind == KernelKind::kEfficient && o.device.is_cpu()) return "cpu_flash";
  return std::string(to_string(choice.kind));
}

// Measures two sides in turn and returns the ratio of the first over the second. It is invalid unless both are computed
// by one and the same operator.
BenchRatio compared(GpuBench& bench, const std::string& name, const std::string& settings,
                    std::vector<TimedSide>& sides, std::optional<double> goal) {
  measure_in_turn(sides, bench.options.device, bench.options.rounds);
  BenchRatio r = ratio_of(name, settings + ", by " + sides[0].operators(), sides[0].seconds, sides[1].seconds, goal);
  if (sides[0].computed.size() != 1 || sides[0].computed != sides[1].computed) {
    r.invalid =
        sides[0].name + " computed by " + sides[0].operators() + ", " + sides[1].name + " by " + sides[1].operators();
  }
  return r;
}

}  // namespace

// What the executor costs beyond the operator that it calls.
void bench_dense(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  bench.out << "causal attention through the executor on one rank, compared with calling LibTorch's "
            << (o.device.is_cuda() ? "cuDNN" : "CPU") << " operator; TFLOP/s of the pairs that count\n\n"
            << "    tokens  direction   executor ms   TFLOP/s  operator ms   TFLOP/s  over the operator, computed by\n";
  for (const int64_t length : o.lengths) {
    const AttentionInputs problem = inputs_of(o, length);
    // The operator alone comes first: LibTorch would crash at the second call of a shape that cuDNN has refused, which
    // the executor gives to another operator.
    OperatorCall theirs(problem, /*causal=*/true);
    theirs.run();
    ExecutorCall ours(problem, call_of(o, length, causal_pattern()));
    ours.run();
    const double difference = largest_error(ours.output().out, ours.gradients(), theirs.out(), theirs.gradients());
    const std::string what =
        line("dense %lld: out, dq, dk or dv of the executor, compared with the operator's,", length);
    if (!right(bench, what, difference, 2 * bound_of(problem, ours))) continue;
    for (const bool back : {false, true}) {
      const char* const direction = back ? "backward" : "forward";
      const std::string of = line("dense %s %lld", direction, length);
      std::vector<TimedSide> sides = {{"the executor", [&] { back ? ours.backward() : ours.forward(); }},
                                      {"the baseline", [&] { back ? theirs.backward() : theirs.forward(); }}};
      const BenchRatio& r =
          bench.ratio(compared(bench, "gpu/" + of, settings_of(bench, length), sides, goal_of(o, kDenseGoal)));
      const double flops = (back ? 10 : 4) * static_cast<double>(o.head_dim) * ours.pairs();
      bench.out << line("%10lld  %-9s", length, direction);
      for (const TimedSide& side : sides) {
        const double seconds = least(side.seconds);
        bench.out << line(&side == &sides[0] ? "  %12.3f  %8.1f" : "  %11.3f  %8.1f", 1e3 * seconds,
                          teraflops(flops, seconds));
        bench.figure(&side == &sides[0] ? of : of + ", operator", "TFLOP/s", teraflops(flops, seconds),
                     teraflops(flops, median(side.seconds)), side.operators(), &side == &sides[0] ? r.invalid : "");
      }
      bench.out << line("  %8.3f  ", r.ratio) << sides[0].operators() << outcome(r) << std::endl;
      bench.end_figures("dense");  // the run may be cut off at any time
    }
  }
}

namespace {

enum RingCommand : int64_t { kForward, kBackward, kGather, kStop };

// Runs a ring of this request on one device: its ranks are threads, each with its rows of `whole`, through the executor
// and over the threads backend, which passes keys, values and gradients on without copying them. `measure` runs on rank
// 0. Its function makes all ranks do something, and returns when they have issued it to the device: kForward,
// kBackward, or kGather, which puts their results into `out` and `gradients`, whole tensors.
void on_ring(const PlanRequest& request, const AttentionInputs& whole, const AttentionCall& like, at::Tensor& out,
             AttentionGradients& gradients,
             const std::function<void(const std::function<void(RingCommand)>&)>& measure) {
  std::mutex mutex;
  const auto body = [&](Communicator& comm) {
    comm.set_timeout(Seconds(24 * 3600));  // the others wait while rank 0 measures something else
    const auto rows = [&](const Layout& layout) {
      return at::tensor(layout.positions(comm.rank()), at::kLong).to(whole.q.device());
    };
    const at::Tensor queries = rows(query_layout(request)), keys = rows(key_layout(request));
    const auto part = [](const at::Tensor& t, const at::Tensor& which) { return t.index_select(1, which); };
    AttentionCall call = like;
    call.request = request;
    call.comm = &comm;
    ExecutorCall mine({part(whole.q, queries), part(whole.k, keys), part(whole.v, keys), part(whole.dout, queries)},
                      std::move(call));
    const auto obey = [&](RingCommand command) {
      at::Tensor told = at::full({1}, static_cast<int64_t>(command), at::kLong);
      comm.host().broadcast(told, 0, {"bench gpu", 0});
      command = static_cast<RingCommand>(told.item<int64_t>());
      if (command == kForward) mine.forward();
      if (command == kBackward) mine.backward();
      if (command == kGather) {
        const std::lock_guard lock(mutex);
        out.index_copy_(1, queries, mine.output().out);
        gradients.dq.index_copy_(1, queries, mine.gradients().dq);
        gradients.dk.index_copy_(1, keys, mine.gradients().dk);
        gradients.dv.index_copy_(1, keys, mine.gradients().dv);
      }
      comm.barrier({"bench gpu", 0});
      return command != kStop;
    };
    if (comm.rank() == 0) measure(obey);
    while (obey(kStop)) {
    }
  };
  run_ranks(request.ranks, body, whole.q.device());
}

}  // namespace

// What a ring computes beyond one whole call: smaller tiles, merges and additions of gradients.
void bench_ring(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  const AttentionInputs problem = inputs_of(o, o.length);
  const AttentionCall call = call_of(o, o.length, causal_pattern());
  PlanRequest request = call.request;
  request.layout = LayoutKind::kZigzag;
  request.schedule = ScheduleKind::kRing;
  request.ranks = o.ranks;
  at::Tensor out = at::empty_like(problem.q);
  AttentionGradients gradients = {at::empty_like(problem.q), at::empty_like(problem.k), at::empty_like(problem.v)};
  on_ring(request, problem, call, out, gradients, [&](const std::function<void(RingCommand)>& ring) {
    ExecutorCall whole(problem, call);
    whole.run();
    for (const RingCommand command : {kForward, kBackward, kGather}) ring(command);
    const double difference = largest_error(out, gradients, whole.output().out, whole.gradients());
    if (!right(bench, "ring: out, dq, dk or dv, compared with the whole call's,", difference,
               2 * bound_of(problem, whole)))
      return;
    bench.out << line(
        "causal attention of %lld tokens: a zigzag ring of %lld ranks that share one device, compared with one call\n\n"
        "  direction     ring ms  one call ms  over one call, computed by\n",
        o.length, o.ranks);
    const std::string settings = settings_of(bench, o.length) + line(", %lld ranks", o.ranks);
    const std::string own = own_operator_of(o);
    std::vector<double> ring_both(static_cast<size_t>(o.rounds)), whole_both(static_cast<size_t>(o.rounds));
    OperatorNames computed;  // the ring, in both directions
    std::string invalid;
    const auto print = [&](const char* direction, const BenchRatio& r, const std::string& operators, double mine,
                           double base) {
      bench.out << line("  %-9s  %10.3f  %11.3f  %13.3f", direction, 1e3 * mine, 1e3 * base, r.ratio) << "  "
                << operators << outcome(r) << std::endl;
    };
    for (const bool back : {false, true}) {
      const std::string direction = back ? "backward" : "forward";
      std::vector<TimedSide> sides = {{"the ring", [&] { ring(back ? kBackward : kForward); }},
                                      {"one call", [&] { back ? whole.backward() : whole.forward(); }}};
      BenchRatio& r =
          bench.ratio(compared(bench, line("gpu/ring of %lld %s", o.ranks, direction), settings, sides, std::nullopt));
      if (r.invalid.empty() && sides[1].operators() != own) r.invalid = computed_instead(sides[1], own);
      for (size_t i = 0; i < ring_both.size(); ++i) {
        ring_both[i] += sides[0].seconds[i];
        whole_both[i] += sides[1].seconds[i];
      }
      computed.insert(sides[0].computed.begin(), sides[0].computed.end());
      if (invalid.empty()) invalid = r.invalid;
      print(direction.c_str(), r, sides[0].operators(), least(sides[0].seconds), least(sides[1].seconds));
      bench.figure("ring " + direction, "s", sides[0].seconds, sides[0].operators(), r.invalid);
      bench.figure("ring " + direction + ", one call", "s", sides[1].seconds, sides[1].operators());
      bench.end_figures("ring");
    }
    BenchRatio& r =
        bench.ratio(ratio_of(line("gpu/ring of %lld", o.ranks), settings + ", by " + text_of_operators(computed),
                             ring_both, whole_both, goal_of(o, kRingGoal)));
    r.invalid = invalid;
    print("both", r, text_of_operators(computed), least(ring_both), least(whole_both));
  });
}

namespace {

struct NamedPattern {
  std::string name;
  PatternSpec spec;
};

// For 32,768 tokens: a window of 4,096, dilated attention with segments of 2,048 to 32,768 and rates 1 to 16, and
// blocks with density 0.1. Other lengths scale the sizes in proportion.
std::vector<NamedPattern> gpu_patterns(int64_t length) {
  std::vector<NamedPattern> patterns(3);
  const int64_t window = std::max<int64_t>(1, length / 8);
  patterns[0].name = line("window %lld", window);
  patterns[0].spec.kind = PatternSpec::Kind::kWindow;
  patterns[0].spec.left = window - 1;
  patterns[1].name = "dilated";
  patterns[1].spec.kind = PatternSpec::Kind::kDilated;
  for (const int64_t rate : {1, 2, 4, 8, 16}) {
    patterns[1].spec.dilated.segment_lengths.push_back(std::max<int64_t>(1, length / 16 * rate));
    patterns[1].spec.dilated.dilation_rates.push_back(rate);
  }
  patterns[2] = {"blocks, density 0.1", random_blocks(length >= 4096 ? 128 : 16, 1, length, /*density=*/0.1)};
  return patterns;
}

}  // namespace

void bench_attention_patterns(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  const AttentionInputs problem = inputs_of(o, o.length);
  const AttentionShape shape = shape_of(o, o.length);
  ExecutorCall dense(problem, call_of(o, o.length, PatternSpec{}));
  dense.forward();
  const std::string own = own_operator_of(o);
  bench.out << line(
      "patterns of %lld tokens, compared with their share of the call without a mask (1.00: the same time for a "
      "pair)\n\n"
      "  pattern               share  direction         ms  dense ms  over share  error of some rows, operators\n",
      o.length);
  for (const NamedPattern& p : gpu_patterns(o.length)) {
    validate(p.spec, shape);
    ExecutorCall call(problem, call_of(o, o.length, p.spec));
    call.run();
    const double error = error_of_rows(problem, p.spec, shape, call);
    const std::string what = p.name + ": out, lse or dq of some rows, compared with the oracle's,";
    if (!right(bench, what, error, bound_of(problem, call))) continue;
    const double share = call.pairs() / dense.pairs();
    for (const bool back : {false, true}) {
      const std::string direction = back ? "backward" : "forward", name = p.name + " " + direction;
      std::vector<TimedSide> sides = {{p.name, [&] { back ? call.backward() : call.forward(); }},
                                      {"the call without a mask", [&] { back ? dense.backward() : dense.forward(); }}};
      measure_in_turn(sides, o.device, o.rounds);
      std::vector<double> expected = sides[1].seconds;
      for (double& seconds : expected) seconds *= share;
      const std::string by = sides[0].operators() + ", the whole call by " + sides[1].operators();
      BenchRatio& r = bench.ratio(ratio_of("gpu/" + name + " over its share",
                                           settings_of(bench, o.length) + ", by " + by, sides[0].seconds, expected));
      // A kernel may hand bands and gathered blocks to another operator (choose_kernel.h), but not a whole call.
      if (sides[1].operators() != own) r.invalid = computed_instead(sides[1], own);
      bench.out << line("  %-20s  %.4f  %-9s  %9.3f  %8.3f  %10.2f  %8.2g   ", p.name, share, direction,
                        1e3 * least(sides[0].seconds), 1e3 * least(sides[1].seconds), r.ratio, error)
                << by << outcome(r) << std::endl;
      bench.figure(name, "s", sides[0].seconds, sides[0].operators(), r.invalid);
      bench.figure(name + ", over share", "ratio", r.ratio, r.ratio, by, r.invalid);
      bench.figure(name + ", call without a mask", "s", sides[1].seconds, sides[1].operators());
      bench.end_figures("patterns");
    }
    bench.figure(p.name + ", off the oracle", "relative", error, error);
    bench.end_figures("patterns");
  }
}

}  // namespace annulus
