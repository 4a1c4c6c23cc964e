// `annulus bench ring`: what distribution costs. It compares the CPU seconds of all ranks of a ring with those of one
// process that does the same work, in turn within one run. One process uses annulus on one rank and, for causal and
// full attention, also LibTorch's flash attention; the faster one is the baseline.
#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/plan/layout.h"
#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "attention/proof/plans.h"
#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/operators_seen.h"
#include "common/error.h"
#include "common/simd/instruction_set.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

// The goal: the CPU seconds of the whole ring over those of one process.
constexpr double kRingGoal = 1.05;

constexpr const char* kLegend =
    "\nOutside of kernel: CPU seconds of all ranks together apart from computing tiles. MB sent: by all ranks;\n"
    "lent: passed on without a copy (ANNULUS_SHARED_MEMORY=0 copies them).\n"
    "Lower bound, if only keys and values travel: each row is sent once to each rank that needs it, and its\n"
    "gradient back once.\n"
    "Exposed: the longest time that a rank waited for transfers. MB held: keys, values, gradients and kernel\n"
    "results that one rank holds at once, including its own.\n";

// What a turn took. The first group adds up the ranks, the second has the most of any rank.
enum Summed { kCpu, kOutside, kSent, kLent, kSummed };  // CPU seconds, those outside of the kernel; bytes
enum Largest { kWall, kExposed, kHeld, kLargest };      // seconds; seconds of waiting; bytes

// The rings of one size.
class Ring {
 public:
  Ring(const PlanRequest& wanted, int64_t head_dim, int ranks, Communicator& world)
      // A small ring takes ranks that are far apart, because neighbouring ranks may share a core.
      : ranks_(ranks),
        head_dim_(head_dim),
        world_(world),
        comm_(world.split(world.rank() % (world.size() / ranks) == 0 ? 0 : -1, world.rank())) {
    if (!comm_) return;
    AttentionCall call;
    call.request = wanted;
    call.request.ranks = ranks;
    call.comm = comm_.get();
    call.label = "bench ring";
    AttentionShape mine = wanted.shape;
    mine.q_len = query_layout(call.request).count(comm_->rank());
    mine.k_len = key_layout(call.request).count(comm_->rank());
    call_.emplace(random_inputs(mine, head_dim, at::kFloat), std::move(call));
  }

  // Collective over the world.
  void run(bool counted) {
    world_.barrier({"bench", 0});
    std::vector<double> sums(kSummed), most(kLargest);
    if (call_) {
      const OperatorsSeen seen;
      const double cpu = cpu_seconds(), wall = wall_seconds();
      call_->run();
      const AttentionStats &there = call_->forward_stats(), &back = call_->backward_stats();
      sums[kCpu] = cpu_seconds() - cpu;
      most[kWall] = wall_seconds() - wall;
      sums[kOutside] = sums[kCpu] - seen.attention_seconds();
      sums[kSent] = static_cast<double>(there.bytes_sent + back.bytes_sent);
      sums[kLent] = static_cast<double>(there.bytes_lent + back.bytes_lent);
      most[kExposed] = there.exposed_seconds + back.exposed_seconds;
      most[kHeld] =
          4.0 * static_cast<double>(std::max(there.peak_kv_elements, back.peak_kv_elements + back.peak_grad_elements +
                                                                         back.peak_result_elements));
    }
    sums = over_ranks(world_, sums, ReduceOp::kSum);
    most = over_ranks(world_, most, ReduceOp::kMax);
    if (!counted) return;
    if (costs_.empty() || sums[kCpu] < least(costs_)) exposed_ = most[kExposed];
    costs_.push_back(sums[kCpu]);
    walls_.push_back(most[kWall]);
    outside_.push_back(sums[kOutside]);
    sums_ = sums;
    most_ = most;
  }

  // The bytes that the plan sends, and the fewest that a plan can send which moves keys and values alone: those of
  // group-cast, with each row of a key and value once in the forward, and its gradient once. Of all ranks; collective.
  void count_bytes() {
    double planned = 0, fewest = 0;
    if (call_) {
      const Program& program = call_->output().program();
      PlanRequest direct = program.request;
      direct.schedule = ScheduleKind::kGroupCast;
      direct.within = 0;
      const auto cast = cached_plan(direct, comm_->rank());
      planned = static_cast<double>(traffic(program, program.forward).bytes(head_dim_, 4, 4) +
                                    traffic(program, program.backward).bytes(head_dim_, 4, 4));
      fewest = 2.0 * static_cast<double>(traffic(cast->program, cast->program.forward).bytes(head_dim_, 4, 4));
    }
    const std::vector<double> bytes = over_ranks(world_, {planned, fewest}, ReduceOp::kSum);
    planned_ = bytes[0];
    fewest_ = bytes[1];
  }

  int ranks() const { return ranks_; }
  const std::vector<double>& costs() const { return costs_; }  // CPU seconds of each turn, all ranks together
  std::string row(double baseline) const {
    const double cpu = least(costs_), sent = sums_[kSent];
    return line("  %-12lld  %11.3f  %16.3f  %20.4f  %8.2f  %12.3f  %11.3f  %18.3f  %10.4f  %7.3f  %8.2f\n", ranks_, cpu,
                cpu / baseline, least(outside_), sent / 1e6, sums_[kLent] / std::max(sent, 1.0),
                sent / std::max(planned_, 1.0), sent / std::max(fewest_, 1.0), exposed_, least(walls_),
                most_[kHeld] / 1e6);
  }

 private:
  const int ranks_;
  const int64_t head_dim_;
  Communicator& world_;
  const std::shared_ptr<Communicator> comm_;
  std::optional<ExecutorCall> call_;
  std::vector<double> costs_, walls_, outside_;
  std::vector<double> sums_, most_;  // of the last turn; bytes are the same in all of them
  double exposed_ = 0;               // of the turn with the least cost
  double planned_ = 0, fewest_ = 0;
};

class RingBenchmark : public Benchmark {
 public:
  RingBenchmark() { request_.shape = {1, 8, 8, 8192, 8192, 0}; }

  void declare(CLI::App& app) override {
    add(app, "--length", request_.shape.q_len, "tokens of the whole sequence");
    add(app, "--heads", request_.shape.heads, "query heads");
    add(app, "--kv-heads", request_.shape.kv_heads, "kv heads");
    add(app, "--head-dim", head_dim_, "head size");
    add(app, "--pattern", pattern_, "the keys that a query attends to");
    add(app, "--layout", layout_, "contiguous, zigzag, striped, balanced or per-document");
    add(app, "--schedule", schedule_, schedule_kinds());
    add(app, "--repeats,--rounds", rounds_, "turns that count");
    app.footer(
        "It starts 4 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench ring");
  }

  void check() override {
    request_.shape.k_len = request_.shape.q_len;
    request_.pattern = parse_pattern(pattern_, "--pattern");
    request_.layout = parse_layout(layout_, "--layout");
    request_.schedule = parse_schedule(schedule_, "--schedule");
    validate(request_);
    validate(request_.pattern, request_.shape);
  }

  std::string request() const override { return request_.text(); }

  // Measures rings of 2 and 4 ranks (as far as the world has them) and one process alone in turn, in fp32 with one
  // thread for each rank.
  std::vector<BenchRatio> run(Communicator& world, std::ostream& out) override {
    if (world.size() < 2) {
      throw Error(ErrorKind::kPlan, "bench",
                  "a ring needs at least 2 ranks, but this job has 1; use `annulus launch -n 4 bench ring`");
    }
    at::set_num_threads(1);
    const AttentionShape& shape = request_.shape;
    request_.pattern = read_block_maps(request_.pattern, shape);
    std::vector<std::unique_ptr<Ring>> rings;
    for (const int n : {2, 4}) {
      if (n <= world.size()) rings.push_back(std::make_unique<Ring>(request_, head_dim_, n, world));
    }
    // LibTorch's operator supports full and causal attention only.
    const bool causal = request_.pattern == causal_pattern(), both = causal || request_.pattern == PatternSpec{};
    std::optional<ExecutorCall> alone;
    std::optional<OperatorCall> by_operator;
    if (world.rank() == 0) {
      const AttentionInputs whole = random_inputs(shape, head_dim_, at::kFloat);
      AttentionCall call;
      call.request = request_;
      call.request.ranks = 1;
      alone.emplace(whole, std::move(call));
      if (both) by_operator.emplace(whole, causal);
    }
    std::vector<double> alone_costs, operator_costs;
    // The first turn does not count: it touches memory and sends messages for the first time.
    for (int64_t turn = -1; turn < rounds_; ++turn) {
      const auto measure = [&](auto& call, std::vector<double>& costs) {
        world.barrier({"bench", 0});
        if (!call) return;
        const double begin = cpu_seconds();
        call->run();
        if (turn >= 0) costs.push_back(cpu_seconds() - begin);
      };
      measure(alone, alone_costs);
      if (both) measure(by_operator, operator_costs);
      for (const auto& ring : rings) ring->run(turn >= 0);
    }
    for (const auto& ring : rings) ring->count_bytes();
    if (world.rank() != 0) return {};
    const bool operator_is_better = both && least(operator_costs) < least(alone_costs);
    const std::vector<double>& base = operator_is_better ? operator_costs : alone_costs;
    const std::string settings = line("%lld tokens, %lld:%lld heads of %lld, fp32; layout %s, schedule %s", shape.q_len,
                                      shape.heads, shape.kv_heads, head_dim_, layout_, schedule_);
    const std::string pattern = request_.pattern.text();
    out << "forward and backward, " << settings << "\npattern " << pattern << "\n"
        << line("least of %lld interleaved turns; baseline: one process, one thread, %s; vector instructions: %s\n\n",
                rounds_, both ? "the better of two kernels" : "annulus on one rank",
                instruction_set_name(instruction_set()))
        << "  ranks          CPU seconds  over one process  outside of kernel, s   MB sent  of them lent  of the plan  "
           "of the lower bound   exposed s   wall s   MB held\n";
    const auto alone_row = [&](const char* which, const std::vector<double>& costs) {
      out << line("  1, %-9s  %11.3f  %16.3f\n", which, least(costs), least(costs) / least(base));
    };
    alone_row("annulus", alone_costs);
    if (both) alone_row("LibTorch", operator_costs);
    std::vector<BenchRatio> ratios;
    for (const auto& ring : rings) {
      ratios.push_back(ratio_of(line("ring/%lld ranks over one process", ring->ranks()), settings + ", " + pattern,
                                ring->costs(), base, kRingGoal));
      out << ring->row(least(base));
    }
    out << kLegend << std::flush;
    return ratios;
  }

 private:
  PlanRequest request_;
  int64_t head_dim_ = 64, rounds_ = 5;
  std::string pattern_ = "{ kind = \"causal\" }", layout_ = "zigzag", schedule_ = "ring";
};

}  // namespace

std::unique_ptr<Benchmark> make_ring_benchmark() { return std::make_unique<RingBenchmark>(); }

}  // namespace annulus
