// The parts "dense", "ring" and "patterns" of `annulus bench gpu`; see gpu.h. Called by gpu.cc.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "attention/execution/attention.h"
#include "attention/oracle/oracle.h"
#include "attention/oracle/rounding.h"
#include "attention/pattern/pattern.h"
#include "benchmarks/gpu/gpu_parts.h"
#include "benchmarks/gpu/operators_seen.h"
#include "benchmarks/gpu/simulated_ring.h"
#include "benchmarks/measure.h"
#include "benchmarks/patterns.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus {
namespace {

constexpr double kDenseGoal = 1 / 0.97;
constexpr double kRingGoal = 1.06;

struct Problem {
  at::Tensor q, k, v, dout;
};

Problem random_problem(const GpuBenchOptions& o, int64_t length) {
  const auto options = at::TensorOptions().device(o.device).dtype(o.type);
  const auto made = [&](int64_t heads) { return at::randn({1, length, heads, o.head_dim}, options); };
  return {made(o.heads), made(o.kv_heads), made(o.kv_heads), made(o.heads)};
}

std::string settings_of(const GpuBench& bench, int64_t length) {
  const GpuBenchOptions& o = bench.options;
  return line("%s, %lld tokens, heads %lld:%lld of %lld, %s", bench.facts.name.c_str(), static_cast<long long>(length),
              static_cast<long long>(o.heads), static_cast<long long>(o.kv_heads), static_cast<long long>(o.head_dim),
              c10::toString(o.type));
}

// One call through the executor on one rank.
class ExecutorCall {
 public:
  ExecutorCall(const GpuBenchOptions& o, const Problem& problem, const PatternSpec& pattern) : problem_(problem) {
    call_.request.shape = shape_of(o, problem.q.size(1));
    call_.request.pattern = pattern;
    call_.kernel = o.kernel;
    call_.comm = self_.get();
    call_.label = "bench gpu";
    forward();
  }
  void forward() { output_ = attention_forward(problem_.q, problem_.k, problem_.v, call_); }
  void backward() {
    gradients_ = attention_backward(problem_.dout, problem_.q, problem_.k, problem_.v, output_, call_);
  }
  const AttentionOutput& output() const { return output_; }
  const AttentionGradients& gradients() const { return gradients_; }
  double pairs() const { return static_cast<double>(count_pairs(*cached_pattern(call_.request))); }

 private:
  const std::shared_ptr<Communicator> self_ = make_self_communicator();
  const Problem& problem_;
  AttentionCall call_;
  AttentionOutput output_;
  AttentionGradients gradients_;
};

// LibTorch's own operator, causal: cuDNN's on a GPU, flash attention on a CPU.
class OperatorCall {
 public:
  explicit OperatorCall(const Problem& p)
      : q_(p.q.transpose(1, 2)), k_(p.k.transpose(1, 2)), v_(p.v.transpose(1, 2)), dout_(p.dout.transpose(1, 2)) {
    forward();
  }
  void forward() {
    if (q_.is_cuda()) {
      auto r = at::_scaled_dot_product_cudnn_attention(q_, k_, v_, {}, /*compute_log_sumexp=*/true, /*dropout_p=*/0,
                                                       /*is_causal=*/true, /*return_debug_mask=*/false);
      std::tie(out_, lse_, cum_q_, cum_k_) =
          std::make_tuple(std::get<0>(r), std::get<1>(r), std::get<2>(r), std::get<3>(r));
      max_q_ = std::get<4>(r).expect_int();
      max_k_ = std::get<5>(r).expect_int();
      seed_ = std::get<6>(r);
      offset_ = std::get<7>(r);
    } else {
      std::tie(out_, lse_) =
          at::_scaled_dot_product_flash_attention_for_cpu(q_, k_, v_, /*dropout_p=*/0, /*is_causal=*/true);
    }
  }
  void backward() {
    gradients_ = q_.is_cuda()
                     ? at::_scaled_dot_product_cudnn_attention_backward(dout_, q_, k_, v_, out_, lse_, seed_, offset_,
                                                                        /*attn_bias=*/{}, cum_q_, cum_k_, max_q_,
                                                                        max_k_, /*dropout_p=*/0, /*is_causal=*/true)
                     : at::_scaled_dot_product_flash_attention_for_cpu_backward(dout_, q_, k_, v_, out_, lse_,
                                                                                /*dropout_p=*/0, /*is_causal=*/true);
  }
  at::Tensor out() const { return out_.transpose(1, 2); }
  AttentionGradients gradients() const {
    const auto& [dq, dk, dv] = gradients_;
    return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
  }

 private:
  const at::Tensor q_, k_, v_, dout_;
  at::Tensor out_, lse_, cum_q_, cum_k_, seed_, offset_;
  int64_t max_q_ = 0, max_k_ = 0;
  std::tuple<at::Tensor, at::Tensor, at::Tensor> gradients_;
};

// The largest difference of an element of `got` from `want`, divided by the largest absolute element of `want`.
double relative_error(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor expected = want.to(got.device(), at::kDouble);
  const double size = expected.abs().max().item<double>();
  const double error = (got.to(at::kDouble) - expected).abs().max().item<double>();
  return size > 0 ? error / size : error;
}

// The relative error that rounding allows results of the call against the oracle's.
double bound_of(const Problem& problem, const ExecutorCall& call) {
  const int64_t terms =
      problem.q.size(1) * (problem.q.size(2) / problem.k.size(2)) + problem.k.size(1) + problem.q.size(3);
  return rounding_bound(problem.q.scalar_type(), call.output().lse.abs().max().item<double>(), terms);
}

// Compares out, lse and dq of some query rows and heads with the fp64 oracle of these rows. Returns the largest
// relative error.
double error_of_rows(const Problem& problem, const PatternSpec& pattern, const AttentionShape& shape,
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
  bench.wrong.push_back(what + line(" is %.3g off; at most %.3g is expected", error, most));
  bench.out << "  WRONG: " << bench.wrong.back() << std::endl;
  return false;
}

// The goals hold for GPUs only.
std::optional<double> goal_of(const GpuBenchOptions& o, double goal) {
  return o.device.is_cuda() ? std::optional(goal) : std::nullopt;
}

std::string verdict(const BenchRatio& r) {
  if (!r.invalid.empty()) return "  INVALID: " + r.invalid;
  return r.goal ? line(", goal %.3f: %s", *r.goal, r.met() ? "met" : "missed") : "";
}

std::string computed_instead(const TimedSide& side, const std::string& own) {
  return side.name + " computed by " + side.operators + " instead of " + own;
}

double teraflops(double flops, double seconds) { return flops / seconds / 1e12; }

// The operator that o.kernel computes with, as far as it takes the calls.
std::string own_operator_of(const GpuBenchOptions& o) {
  const KernelChoice choice = choose_kernel(o.kernel, o.device.type(), o.type, o.head_dim, /*dropout=*/false);
  return own_operator(choice.kind, o.device);
}

// Measures two sides in turn and returns the ratio of the first over the second. It is invalid unless both are computed
// by one and the same operator.
BenchRatio compared(GpuBench& bench, const std::string& name, const std::string& settings,
                    std::vector<TimedSide>& sides, std::optional<double> goal) {
  measure_in_turn(sides, bench.options.device, bench.options.rounds);
  BenchRatio r = ratio_of(name, settings + ", by " + sides[0].operators, sides[0].seconds, sides[1].seconds, goal);
  if (sides[0].calls.size() != 1 || sides[0].operators != sides[1].operators) {
    r.invalid =
        sides[0].name + " computed by " + sides[0].operators + ", " + sides[1].name + " by " + sides[1].operators;
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
    const Problem problem = random_problem(o, length);
    // The operator alone comes first: LibTorch would crash at the second call of a shape that cuDNN has refused, which
    // the executor gives to another operator.
    OperatorCall theirs(problem);
    theirs.backward();
    ExecutorCall ours(o, problem, causal_pattern());
    ours.backward();
    const AttentionGradients mine = ours.gradients(), other = theirs.gradients();
    const double difference =
        std::max({relative_error(ours.output().out, theirs.out()), relative_error(mine.dq, other.dq),
                  relative_error(mine.dk, other.dk), relative_error(mine.dv, other.dv)});
    const std::string what = line("dense %lld: out, dq, dk or dv of the executor, compared with the operator's,",
                                  static_cast<long long>(length));
    if (!right(bench, what, difference, 2 * bound_of(problem, ours))) continue;
    for (const bool back : {false, true}) {
      const char* const direction = back ? "backward" : "forward";
      std::vector<TimedSide> sides(2);
      sides[0] = {"the executor", [&] { back ? ours.backward() : ours.forward(); }};
      sides[1] = {"the baseline", [&] { back ? theirs.backward() : theirs.forward(); }};
      const BenchRatio& r = bench.ratios.emplace_back(
          compared(bench, line("gpu/dense %s %lld", direction, static_cast<long long>(length)),
                   settings_of(bench, length), sides, goal_of(o, kDenseGoal)));
      const double flops = (back ? 10 : 4) * static_cast<double>(o.head_dim) * ours.pairs();
      const double mine = least(sides[0].seconds), base = least(sides[1].seconds);
      bench.out << line("%10lld  %-9s  %12.3f  %8.1f  %11.3f  %8.1f  %8.3f", static_cast<long long>(length), direction,
                        1e3 * mine, teraflops(flops, mine), 1e3 * base, teraflops(flops, base), r.ratio)
                << "  " << sides[0].operators << verdict(r) << std::endl;
      const std::string of = line("dense %s %lld", direction, static_cast<long long>(length));
      bench.figure({of, "TFLOP/s", teraflops(flops, mine), teraflops(flops, median(sides[0].seconds)),
                    sides[0].operators, r.invalid});
      bench.figure({of + ", operator", "TFLOP/s", teraflops(flops, base), teraflops(flops, median(sides[1].seconds)),
                    sides[1].operators});
      bench.end_figures("dense");  // the run may be cut off at any time
    }
  }
}

// What a ring computes beyond one whole call, which are smaller tiles, merges and additions of gradients.
void bench_ring(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  const Problem problem = random_problem(o, o.length);
  PlanRequest request;
  request.shape = shape_of(o, o.length);
  request.pattern = causal_pattern();
  request.layout = LayoutKind::kZigzag;
  request.schedule = ScheduleKind::kRing;
  request.ranks = o.ranks;
  SimulatedRing ring(request, problem.q, problem.k, problem.v, problem.dout, o.kernel);
  ExecutorCall whole(o, problem, causal_pattern());
  ring.forward();
  ring.backward();
  whole.backward();
  const SimulatedRing::Result got = ring.result();
  const double difference =
      std::max({relative_error(got.out, whole.output().out), relative_error(got.dq, whole.gradients().dq),
                relative_error(got.dk, whole.gradients().dk), relative_error(got.dv, whole.gradients().dv)});
  if (!right(bench, "ring: out, dq, dk or dv, compared with the whole call's,", difference,
             2 * bound_of(problem, whole)))
    return;
  bench.out << line(
      "causal attention of %lld tokens: a zigzag ring of %d ranks, run in turn on one device, compared with one "
      "call\n\n"
      "  direction     ring ms  one call ms  over one call, computed by\n",
      static_cast<long long>(o.length), o.ranks);
  const std::string settings = settings_of(bench, o.length) + line(", %d ranks", o.ranks);
  const std::string own = own_operator_of(o);
  std::vector<double> ring_both(static_cast<size_t>(o.rounds)), whole_both(static_cast<size_t>(o.rounds));
  std::map<std::string, int64_t> calls;  // of the ring, in both directions
  std::string invalid;
  const auto print = [&](const char* direction, const BenchRatio& r, const std::string& operators, double mine,
                         double base) {
    bench.out << line("  %-9s  %10.3f  %11.3f  %13.3f", direction, 1e3 * mine, 1e3 * base, r.ratio) << "  " << operators
              << verdict(r) << std::endl;
  };
  for (const bool back : {false, true}) {
    const char* const direction = back ? "backward" : "forward";
    std::vector<TimedSide> sides(2);
    sides[0] = {"the ring", [&] { back ? ring.backward() : ring.forward(); }};
    sides[1] = {"one call", [&] { back ? whole.backward() : whole.forward(); }};
    BenchRatio& r = bench.ratios.emplace_back(
        compared(bench, line("gpu/ring of %d %s", o.ranks, direction), settings, sides, std::nullopt));
    if (r.invalid.empty() && sides[1].operators != own) r.invalid = computed_instead(sides[1], own);
    for (size_t i = 0; i < ring_both.size(); ++i) {
      ring_both[i] += sides[0].seconds[i];
      whole_both[i] += sides[1].seconds[i];
    }
    calls.insert(sides[0].calls.begin(), sides[0].calls.end());
    if (invalid.empty()) invalid = r.invalid;
    print(direction, r, sides[0].operators, least(sides[0].seconds), least(sides[1].seconds));
    bench.figure({std::string("ring ") + direction, "s", least(sides[0].seconds), median(sides[0].seconds),
                  sides[0].operators, r.invalid});
    bench.figure({std::string("ring ") + direction + ", one call", "s", least(sides[1].seconds),
                  median(sides[1].seconds), sides[1].operators});
    bench.end_figures("ring");
  }
  BenchRatio& r =
      bench.ratios.emplace_back(ratio_of(line("gpu/ring of %d", o.ranks), settings + ", by " + text_of_operators(calls),
                                         ring_both, whole_both, goal_of(o, kRingGoal)));
  r.invalid = invalid;
  print("both", r, text_of_operators(calls), least(ring_both), least(whole_both));
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
  patterns[0].name = line("window %lld", static_cast<long long>(window));
  patterns[0].spec.kind = PatternSpec::Kind::kWindow;
  patterns[0].spec.left = window - 1;
  patterns[1].name = "dilated";
  patterns[1].spec.kind = PatternSpec::Kind::kDilated;
  for (const int64_t rate : {1, 2, 4, 8, 16}) {
    patterns[1].spec.dilated.segment_lengths.push_back(std::max<int64_t>(1, length / 16 * rate));
    patterns[1].spec.dilated.dilation_rates.push_back(rate);
  }
  const int64_t block = length >= 4096 ? 128 : 16;
  patterns[2].name = "blocks, density 0.1";
  patterns[2].spec.kind = PatternSpec::Kind::kBlocks;
  patterns[2].spec.blocks = given_map(
      std::make_shared<const BlockMap>(random_block_map(block, 1, (length + block - 1) / block, /*density=*/0.1)));
  return patterns;
}

}  // namespace

void bench_attention_patterns(GpuBench& bench) {
  const GpuBenchOptions& o = bench.options;
  const Problem problem = random_problem(o, o.length);
  const AttentionShape shape = shape_of(o, o.length);
  ExecutorCall dense(o, problem, PatternSpec{});
  const std::string own = own_operator_of(o);
  bench.out << line(
      "patterns of %lld tokens, compared with their share of the call without a mask (1.00: the same time for a "
      "pair)\n\n"
      "  pattern               share  direction         ms  dense ms  over share  error of some rows, operators\n",
      static_cast<long long>(o.length));
  for (const NamedPattern& p : gpu_patterns(o.length)) {
    validate(p.spec, shape);
    ExecutorCall call(o, problem, p.spec);
    call.backward();
    const double error = error_of_rows(problem, p.spec, shape, call);
    const std::string what = p.name + ": out, lse or dq of some rows, compared with the oracle's,";
    if (!right(bench, what, error, bound_of(problem, call))) continue;
    const double share = call.pairs() / dense.pairs();
    for (const bool back : {false, true}) {
      const char* const direction = back ? "backward" : "forward";
      std::vector<TimedSide> sides(2);
      sides[0] = {p.name, [&] { back ? call.backward() : call.forward(); }};
      sides[1] = {"the call without a mask", [&] { back ? dense.backward() : dense.forward(); }};
      measure_in_turn(sides, o.device, o.rounds);
      std::vector<double> expected = sides[1].seconds;
      for (double& seconds : expected) seconds *= share;
      const std::string by = sides[0].operators + ", the whole call by " + sides[1].operators;
      BenchRatio& r =
          bench.ratios.emplace_back(ratio_of("gpu/" + p.name + " " + direction + " over its share",
                                             settings_of(bench, o.length) + ", by " + by, sides[0].seconds, expected));
      // A kernel may hand bands and gathered blocks to another operator (choose_kernel.h), but not a whole call.
      if (sides[1].operators != own) r.invalid = computed_instead(sides[1], own);
      bench.out << line("  %-20s  %.4f  %-9s  %9.3f  %8.3f  %10.2f  %8.2g   ", p.name.c_str(), share, direction,
                        1e3 * least(sides[0].seconds), 1e3 * least(sides[1].seconds), r.ratio, error)
                << by << verdict(r) << std::endl;
      bench.figure({p.name + " " + direction, "s", least(sides[0].seconds), median(sides[0].seconds),
                    sides[0].operators, r.invalid});
      bench.figure({p.name + " " + direction + ", over share", "ratio", r.ratio, r.ratio, by, r.invalid});
      bench.figure({p.name + " " + direction + ", call without a mask", "s", least(sides[1].seconds),
                    median(sides[1].seconds), sides[1].operators});
      bench.end_figures("patterns");
    }
    bench.figure({p.name + ", off the oracle", "relative", error, error});
    bench.end_figures("patterns");
  }
}

}  // namespace annulus
