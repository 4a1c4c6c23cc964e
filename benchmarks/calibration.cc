// Measures a machine; see calibration.h.
#include "benchmarks/calibration.h"

#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/time.h"
#include "attention/tiles/kernel.h"
#include "attention/tiles/tile_views.h"
#include "benchmarks/attention_calls.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/agreement.h"
#include "common/simd/instruction_set.h"

namespace annulus {
namespace {

const std::vector<int64_t> kLengths = {16, 64, 256, 1024};
constexpr int64_t kSmallMessage = 1 << 10, kLargeMessage = 1 << 23;  // bytes of one tensor

// Repeats `work` for about `seconds`, at least five times, and returns the median of the seconds of one: predictions
// are of what a call usually takes, not of what it takes at best.
double usual_time(double seconds, const std::function<double()>& clock, const std::function<void()>& work) {
  work();  // allocates, and fills caches
  std::vector<double> costs;
  for (double sum = 0; costs.size() < 5 || sum < seconds; sum += std::max(costs.back(), 1e-6)) {
    const double begin = clock();
    work();
    costs.push_back(clock() - begin);
  }
  return median(costs);
}

// The kernel that attention takes here, with blocks of queries and keys to give it tiles of.
class KernelBench {
 public:
  KernelBench(const CalibrationSettings& s, at::ScalarType type, int64_t rows, int64_t keys)
      : settings_(s),
        rows_({{{Span::range(0, 1), Span::range(0, s.heads), {Span::range(0, keys)}}}}),
        q_(at::randn({1, rows, s.heads, s.head_dim}, at::kFloat).to(type)),
        dout_(at::randn_like(q_)),
        k_(at::randn({keys * s.heads, s.head_dim}, at::kFloat).to(type)),
        v_(at::randn_like(k_)),
        call_({.scale = 1 / std::sqrt(static_cast<double>(s.head_dim)), .softcap = 0, .group = 1, .dropout = {}}) {}

  // Tiles of `rows` x `keys` each, side by side along the queries and keys.
  std::vector<Tile> tiles(int64_t rows, int64_t keys, int64_t number, bool backward) const {
    std::vector<Tile> all;
    for (int64_t i = 0; i < number; ++i) {
      const Span queries = Span::range(i * rows, (i + 1) * rows), of = Span::range(i * keys, (i + 1) * keys);
      Tile tile;
      tile.batch = Span::range(0, 1);
      tile.heads = Span::range(0, settings_.heads);
      tile.query_rows = tile.query_positions = queries;
      tile.key_rows = tile.key_positions = of;
      if (backward) tile.grad_buffer = 1, tile.grad_rows = of;
      all.push_back(tile);
    }
    return all;
  }

  // Seconds of one call of the kernel with these tiles.
  double seconds(const std::vector<Tile>& tiles, bool backward, const std::function<double()>& clock) {
    const KeyBlock keys = key_block(k_, v_, rows_, 0);
    const std::unique_ptr<Kernel> kernel = make_kernel(KernelKind::kAuto, q_);
    kernel->begin_forward(q_, call_);
    if (!backward) return usual_time(settings_.seconds, clock, [&] { kernel->forward(keys, tiles, nullptr); });
    kernel->forward(keys, tiles, nullptr);
    at::Tensor out, lse;
    kernel->finish_forward(out, lse);
    const at::ScalarType sums = accumulator_type(q_.scalar_type());
    const at::Tensor dk = at::zeros(k_.sizes(), k_.options().dtype(sums)), dv = at::zeros_like(dk);
    const KeyBlock grads = key_block(dk, dv, rows_, 0);
    const std::unique_ptr<Kernel> back = make_kernel(KernelKind::kAuto, q_);
    back->begin_backward(dout_, q_, out.to(q_.scalar_type()), lse, call_);
    return usual_time(settings_.seconds, clock, [&] { back->backward(keys, grads, tiles, nullptr); });
  }

 private:
  const CalibrationSettings settings_;
  const RowSet rows_;
  const at::Tensor q_, dout_, k_, v_;
  const KernelCall call_;
};

KernelRate measure_rate(const CalibrationSettings& s, at::ScalarType type, bool backward,
                        const std::function<double()>& clock) {
  KernelRate rate;
  rate.rows = rate.keys = kLengths;
  const int64_t smallest = kLengths.front(), number = 16;
  const auto work = [&](int64_t rows, int64_t keys) {
    return static_cast<double>(s.heads * rows * keys) * static_cast<double>(s.head_dim);
  };
  // What a call costs beside its tiles shows in calls with one small tile and with several.
  KernelBench small(s, type, smallest * number, smallest * number);
  const double one = small.seconds(small.tiles(smallest, smallest, 1, backward), backward, clock);
  const double several = small.seconds(small.tiles(smallest, smallest, number, backward), backward, clock);
  const double each = std::max((several - one) / static_cast<double>(number - 1), 1e-9);
  rate.call = std::max(0.0, one - each);
  for (const int64_t rows : kLengths) {
    rate.rates.emplace_back();
    for (const int64_t keys : kLengths) {
      // Tiles beside each other, so that a short measurement is not that of a call alone.
      const int64_t beside = std::max<int64_t>(1, 256 / std::max(rows, keys));
      KernelBench bench(s, type, rows * beside, keys * beside);
      const double took = bench.seconds(bench.tiles(rows, keys, beside, backward), backward, clock);
      rate.rates.back().push_back(static_cast<double>(beside) * work(rows, keys) /
                                  std::max(took - rate.call, took / 10));
    }
  }
  const int64_t longest = kLengths.back();
  KernelBench bench(s, type, longest, longest);
  std::vector<Tile> causal = bench.tiles(longest, longest, 1, backward);
  causal[0].band.hi = 0;
  const double took = bench.seconds(causal, backward, clock) - rate.call, counted = work(longest, longest + 1) / 2;
  const double computed = took * rate.rates.back().back();
  rate.edge = std::clamp((computed - counted) / work(longest, 1), 0.0, static_cast<double>(longest));
  return rate;
}

struct ExchangeTime {
  double cpu = 0, wall = 0;
};

// Ranks 0 and 1 exchange two tensors, as K and V, of `bytes` each.
ExchangeTime measure_exchange(Communicator& world, int64_t bytes, const std::function<double()>& clock) {
  const int rounds = bytes > (1 << 16) ? 10 : 300;
  const bool takes_part = world.rank() < 2;
  const at::Tensor send = at::zeros({bytes / 4}, at::kFloat), receive = at::zeros({bytes / 4}, at::kFloat);
  const at::Tensor other_send = at::zeros_like(send), other_receive = at::zeros_like(receive);
  const int peer = 1 - world.rank();
  std::vector<double> cpu, wall;
  for (int turn = 0; turn < 4; ++turn) {
    world.barrier({"bench", 0});
    const double c = clock(), w = wall_seconds();
    for (int i = 0; takes_part && i < rounds; ++i) {
      world.exchange({{send, peer}, {other_send, peer}}, {{receive, peer}, {other_receive, peer}}, {"bench", 0})
          ->wait();
    }
    const std::vector<double> sum = over_ranks(world, {takes_part ? clock() - c : 0}, ReduceOp::kSum);
    const std::vector<double> most = over_ranks(world, {takes_part ? wall_seconds() - w : 0}, ReduceOp::kMax);
    if (turn == 0) continue;
    cpu.push_back(sum[0] / 2 / rounds);
    wall.push_back(most[0] / rounds);
  }
  return {median(cpu), median(wall)};
}

// A call of one rank as the executor makes it: what it takes, and what is predicted of it.
struct WholeCall {
  double measured = 0;  // seconds
  double kernel = 0;    // predicted seconds of kernels
  double bytes = 0;     // that pass through memory beside them
};

WholeCall whole_call(const CalibrationSettings& s, const MachineProfile& machine, at::ScalarType type,
                     const char* pattern, int64_t length, bool backward, const std::function<double()>& clock) {
  AttentionCall call;
  call.request.shape = {1, s.heads, s.heads, length, length, 0};
  call.request.pattern = parse_pattern(pattern, "calibrate");
  call.request.schedule = ScheduleKind::kRing;
  call.label = "bench calibrate";
  MachineProfile memory = machine;
  memory.copy = 1;
  WholeCall whole;
  const Program program = make_program(call.request, 0);
  const RowBytes bytes{s.head_dim, static_cast<int64_t>(c10::elementSize(type))};
  for (const StepCost& cost : step_costs(program, backward, memory, bytes)) {
    whole.kernel += cost.compute;
    whole.bytes += cost.add;
  }
  ExecutorCall attention(random_inputs(call.request.shape, s.head_dim, type), call);
  attention.forward();
  whole.measured = usual_time(s.seconds, clock, [&] { backward ? attention.backward() : attention.forward(); });
  return whole;
}

void slow_down(KernelRate& rate, double factor) {
  rate.call *= factor;
  for (auto& row : rate.rates) {
    for (double& value : row) value /= factor;
  }
}

// Measured again and again on the same tensors, kernels find their data in caches, which a call does not; and a call
// has work beside them. Two calls, one of which has many pairs for its rows and the other few, tell both: the factor by
// which kernels take longer, and the seconds of a byte of the tensors. Returns the latter.
double fit_to_calls(const CalibrationSettings& s, MachineProfile& machine, at::ScalarType type, bool backward,
                    const std::function<double()>& clock) {
  const WholeCall many = whole_call(s, machine, type, "{ kind = \"full\" }", 1024, backward, clock);
  const WholeCall few =
      whole_call(s, machine, type, "{ kind = \"window\", left = 31, right = 0 }", 4096, backward, clock);
  const double determinant = many.kernel * few.bytes - few.kernel * many.bytes;
  const double factor = (many.measured * few.bytes - few.measured * many.bytes) / determinant;
  const double per_byte = (many.kernel * few.measured - few.kernel * many.measured) / determinant;
  KernelRates& rates = type == at::kFloat ? *machine.fp32 : *machine.bf16;
  slow_down(backward ? rates.backward : rates.forward, std::clamp(factor, 0.5, 2.0));
  return std::clamp(per_byte, 1e-13, 1e-8);
}

}  // namespace

MachineProfile calibrate(Communicator& world, const CalibrationSettings& settings,
                         const std::function<double()>& cpu_seconds) {
  MachineProfile machine;
  machine.name = "here";
  machine.overlap = false;  // the cores that compute move the bytes, too
  // Other ranks wait without computing, so that rank 0 has a core of its own.
  if (world.rank() == 0) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      KernelRates rates{measure_rate(settings, type, false, cpu_seconds),
                        measure_rate(settings, type, true, cpu_seconds)};
      (type == at::kFloat ? machine.fp32 : machine.bf16) = std::move(rates);
    }
    machine.copy = 1e15;
    double per_byte = 0;
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      for (const bool backward : {false, true}) {
        per_byte += fit_to_calls(settings, machine, type, backward, cpu_seconds) / 4;
      }
    }
    machine.copy = 1 / per_byte;
  }
  world.barrier({"bench", 0});
  const ExchangeTime small = measure_exchange(world, kSmallMessage, cpu_seconds);
  const ExchangeTime large = measure_exchange(world, kLargeMessage, cpu_seconds);
  // Each of the two has sent and received two tensors: work of four ends.
  LinkProfile link;
  const double per_byte = std::max((large.cpu - small.cpu) / (4.0 * (kLargeMessage - kSmallMessage)), 1e-15);
  link.bandwidth = std::clamp(1 / per_byte, 1e3, 1e15);
  link.message = std::max(0.0, small.cpu / 2 - 2 * kSmallMessage * per_byte);
  link.latency = std::clamp(small.wall - small.cpu, 0.0, 1.0);
  machine.inside = machine.between = link;
  machine.source = line("annulus bench calibrate: CPU seconds of a rank, %lld threads each, head size %lld, %s",
                        at::get_num_threads(), settings.head_dim, instruction_set_name(instruction_set()));
  return parse_machine(from_first(world, {"the measured profile"}, [&] { return machine.text(); }),
                       "the measured profile");
}

}  // namespace annulus
