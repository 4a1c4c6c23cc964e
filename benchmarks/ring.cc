// Implements ring.h.
#include "benchmarks/ring.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/plan/schedules.h"
#include "attention/plan/traffic.h"
#include "benchmarks/measure.h"
#include "benchmarks/operator_clock.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/text.h"
#include "simd/instruction_set.h"

namespace annulus {
namespace {

struct Inputs {
  at::Tensor q, k, v, dout;
};

Inputs random_rows(const AttentionShape& s, int64_t queries, int64_t keys, int64_t head_dim) {
  return {at::randn({s.batch, queries, s.heads, head_dim}), at::randn({s.batch, keys, s.kv_heads, head_dim}),
          at::randn({s.batch, keys, s.kv_heads, head_dim}), at::randn({s.batch, queries, s.heads, head_dim})};
}

double sum_over(Communicator& world, double value, ReduceOp op = ReduceOp::kSum) {
  at::Tensor t = at::tensor({value}, at::TensorOptions().dtype(at::kDouble));
  world.all_reduce(t, op, {"bench", 0});
  return t.item<double>();
}

// Whether LibTorch's operator can compute the pattern: it supports full and causal attention only.
bool operator_knows(const PatternSpec& pattern) { return pattern == PatternSpec{} || pattern == causal_pattern(); }

// CPU seconds of LibTorch's operator over the whole sequence in one process.
double operator_alone(const Inputs& in, const PlanRequest& request) {
  const bool causal = request.pattern.causal;
  const double before = cpu_seconds();
  const at::Tensor q = in.q.transpose(1, 2), k = in.k.transpose(1, 2), v = in.v.transpose(1, 2);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal);
  at::_scaled_dot_product_flash_attention_for_cpu_backward(in.dout.transpose(1, 2), q, k, v, out, lse, 0.0, causal);
  return cpu_seconds() - before;
}

// CPU seconds of annulus on one rank over the whole sequence.
double annulus_alone(const Inputs& in, const PlanRequest& request) {
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.request = request;
  call.request.ranks = 1;
  call.comm = self.get();
  const double before = cpu_seconds();
  const AttentionOutput out = attention_forward(in.q, in.k, in.v, call);
  attention_backward(in.dout, in.q, in.k, in.v, out, call);
  return cpu_seconds() - before;
}

// The number of rows of other ranks that a rank needs, each counted once.
int64_t needed_rows(const Program& program) {
  int64_t rows = 0;
  std::vector<std::set<int64_t>> seen(static_cast<size_t>(program.request.shape.kv_heads));
  const int64_t group = program.request.shape.heads / program.request.shape.kv_heads;
  for (const Step& step : program.forward) {
    for (const Tile& tile : step.tiles) {
      if (tile.buffer == kOwnKVBuffer) continue;
      for (int64_t h = 0; h < tile.heads.count; ++h) {
        std::set<int64_t>& positions = seen[static_cast<size_t>(tile.heads.at(h) / group)];
        for (int64_t i = 0; i < tile.key_positions.count; ++i) {
          if (positions.insert(tile.key_positions.at(i)).second) rows += tile.batch.count;
        }
      }
    }
  }
  return rows;
}

struct RingResult {
  std::vector<double> turns;                             // CPU seconds of each turn, all ranks together
  double cpu = std::numeric_limits<double>::infinity();  // the least of them
  double wall = std::numeric_limits<double>::infinity();
  double outside = std::numeric_limits<double>::infinity();  // CPU seconds outside of the kernel, the least
  double exposed = 0;  // seconds for which one rank waited for transfers at most, in the turn with the least cpu
  double sent = 0;     // bytes, of all ranks; so are `lent`, `planned` and `lower_bound`
  double lent = 0;
  double planned = 0;
  double lower_bound = 0;
  double memory = 0;  // the most bytes of keys, values, gradients and kernel results that one rank held at once
};

class Ring {
 public:
  Ring(const RingBenchOptions& options, int ranks, Communicator& world)
      // A small ring takes ranks that are far apart, because neighbouring ranks may share a core.
      : world_(world), comm_(world.split(world.rank() % (world.size() / ranks) == 0 ? 0 : -1, world.rank())) {
    if (!comm_) return;
    PlanRequest request = options.request;
    request.ranks = ranks;
    call_.request = request;
    call_.comm = comm_.get();
    call_.label = "bench ring";
    in_ = random_rows(request.shape, query_layout(request).count(comm_->rank()),
                      key_layout(request).count(comm_->rank()), options.head_dim);
  }

  void run(RingResult& result) {
    world_.barrier({"bench", 0});
    AttentionStats forward_stats, backward_stats;
    std::shared_ptr<const Program> program;
    const OperatorClock clock;
    const double cpu_before = cpu_seconds(), wall_before = wall_seconds();
    if (comm_) {
      const AttentionOutput out = attention_forward(in_.q, in_.k, in_.v, call_, &forward_stats);
      attention_backward(in_.dout, in_.q, in_.k, in_.v, out, call_, &backward_stats);
      program = out.program;
    }
    const double used = comm_ ? cpu_seconds() - cpu_before : 0, took = comm_ ? wall_seconds() - wall_before : 0;
    const double inside = comm_ ? clock.attention() : 0;
    const double cpu = sum_over(world_, used), kernel = sum_over(world_, inside);
    const double wall = sum_over(world_, took, ReduceOp::kMax);
    const double exposed =
        sum_over(world_, forward_stats.exposed_seconds + backward_stats.exposed_seconds, ReduceOp::kMax);
    const double memory =
        4.0 * static_cast<double>(std::max(forward_stats.peak_kv_elements, backward_stats.peak_kv_elements +
                                                                               backward_stats.peak_grad_elements +
                                                                               backward_stats.peak_result_elements));
    result.sent = sum_over(world_, static_cast<double>(forward_stats.bytes_sent + backward_stats.bytes_sent));
    result.lent = sum_over(world_, static_cast<double>(forward_stats.bytes_lent + backward_stats.bytes_lent));
    const int64_t dim = in_.q.defined() ? in_.q.size(3) : 0;
    double planned = 0, bound = 0;
    if (program) {
      planned = static_cast<double>(traffic(*program, program->forward).bytes(dim, 4, 4) +
                                    traffic(*program, program->backward).bytes(dim, 4, 4));
      bound = 4.0 * static_cast<double>(needed_rows(*program) * 2 * dim * 2);  // K and V there, dK and dV back
    }
    result.planned = sum_over(world_, planned);
    result.lower_bound = sum_over(world_, bound);
    result.memory = sum_over(world_, memory, ReduceOp::kMax);
    result.turns.push_back(cpu);
    result.wall = std::min(result.wall, wall);
    if (cpu < result.cpu) {
      result.cpu = cpu;
      result.exposed = exposed;
    }
    result.outside = std::min(result.outside, cpu - kernel);
  }

 private:
  Communicator& world_;
  std::shared_ptr<Communicator> comm_;
  AttentionCall call_;
  Inputs in_;
};

// The goal: the CPU seconds of the whole ring over those of one process.
constexpr double kGoal = 1.05;

constexpr const char* kLegend =
    "\nOutside of kernel: CPU seconds of all ranks together apart from computing tiles. MB sent: by all ranks;\n"
    "lent: passed on without a copy (ANNULUS_SHARED_MEMORY=0 copies them).\n"
    "Lower bound: each key and value row is sent once to each rank that needs it, and its gradient back once.\n"
    "Exposed: the longest time that a rank waited for transfers. MB held: keys, values, gradients and kernel\n"
    "results that one rank holds at once, including its own.\n";

}  // namespace

std::vector<BenchRatio> run_ring_bench(const RingBenchOptions& options, Communicator& world, std::ostream& out) {
  if (world.size() < 2) {
    throw Error(ErrorKind::kPlan, "bench",
                "a ring needs at least 2 ranks, but this job has 1; use `annulus launch -n 4 bench ring`");
  }
  const AttentionShape& shape = options.request.shape;
  at::set_num_threads(1);
  std::vector<int> sizes;
  for (const int n : {2, 4}) {
    if (n <= world.size()) sizes.push_back(n);
  }
  std::vector<Ring> rings;
  for (const int n : sizes) rings.emplace_back(options, n, world);
  std::vector<RingResult> results(sizes.size());
  Inputs whole;
  if (world.rank() == 0) whole = random_rows(shape, shape.q_len, shape.k_len, options.head_dim);
  std::vector<double> annulus_turns, operator_turns;
  const bool both = operator_knows(options.request.pattern);
  // The first turn does not count: it touches memory and sends messages for the first time.
  for (int64_t turn = -1; turn < options.repeats; ++turn) {
    world.barrier({"bench", 0});
    const auto measure = [&](auto alone, std::vector<double>& turns) {
      const double cpu = sum_over(world, world.rank() == 0 ? alone(whole, options.request) : 0);
      if (turn >= 0) turns.push_back(cpu);
    };
    measure(annulus_alone, annulus_turns);
    if (both) measure(operator_alone, operator_turns);
    for (size_t i = 0; i < rings.size(); ++i) {
      RingResult ignored;
      rings[i].run(turn >= 0 ? results[i] : ignored);
    }
  }
  if (world.rank() != 0) return {};
  const auto least = [](const std::vector<double>& turns) { return *std::min_element(turns.begin(), turns.end()); };
  const bool operator_is_better = both && least(operator_turns) < least(annulus_turns);
  const std::vector<double>& alone_turns = operator_is_better ? operator_turns : annulus_turns;
  const double baseline = least(alone_turns);
  const std::string settings =
      line("%lld tokens, %lld:%lld heads of %lld, fp32; layout %s, schedule %s", static_cast<long long>(shape.q_len),
           static_cast<long long>(shape.heads), static_cast<long long>(shape.kv_heads),
           static_cast<long long>(options.head_dim), std::string(to_string(options.request.layout)).c_str(),
           std::string(to_string(options.request.schedule)).c_str());
  const std::string pattern = options.request.pattern.text();
  out << "forward and backward, " << settings << "\npattern " << pattern << "\n";
  out << line("least of %lld interleaved turns; baseline: one process, one thread, %s; vector instructions: %s\n\n",
              static_cast<long long>(options.repeats), both ? "the better of two kernels" : "annulus on one rank",
              instruction_set_name(instruction_set()));
  out << "  ranks          CPU seconds  over one process  outside of kernel, s   MB sent  of them lent  of the plan  "
         "of the lower "
         "bound   exposed s   wall s   MB held\n";
  const auto alone_line = [&](const char* which, const std::vector<double>& turns) {
    out << line("  1, %-9s  %11.3f  %16.3f\n", which, least(turns), least(turns) / baseline);
  };
  alone_line("annulus", annulus_turns);
  if (both) alone_line("LibTorch", operator_turns);
  std::vector<BenchRatio> ratios;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const RingResult& r = results[i];
    ratios.push_back(ratio_of("ring/" + counted(sizes[i], "rank") + " over one process", settings + ", " + pattern,
                              r.turns, alone_turns, kGoal));
    out << line("  %-12d  %11.3f  %16.3f  %20.4f  %8.2f  %12.3f  %11.3f  %18.3f  %10.4f  %7.3f  %8.2f\n", sizes[i],
                r.cpu, r.cpu / baseline, r.outside, r.sent / 1e6, r.lent / std::max(r.sent, 1.0),
                r.sent / std::max(r.planned, 1.0), r.sent / std::max(r.lower_bound, 1.0), r.exposed, r.wall,
                r.memory / 1e6);
  }
  out << kLegend;
  out.flush();
  return ratios;
}

}  // namespace annulus
