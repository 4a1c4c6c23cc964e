// Implements calls.h.
#include "benchmarks/seeds/calls.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/plan/layout.h"
#include "benchmarks/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/threads/threads.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

// A number of /proc/self/status in bytes, 0 if it is not there.
int64_t bytes_in_status(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string text; std::getline(status, text);) {
    if (!text.starts_with(key + ":")) continue;
    std::istringstream rest(text.substr(key.size() + 1));
    int64_t kib = 0;
    rest >> kib;
    return kib << 10;
  }
  return 0;
}

double kv_bytes_of_part(const PlanRequest& request, int64_t head_dim) {
  const AttentionShape& s = request.shape;
  return 2.0 * 4.0 * static_cast<double>(s.batch * s.kv_heads * s.k_len * head_dim) / request.ranks;
}

// Tensor `number`, of `length` positions in all, at those of the spans.
at::Tensor drawn_tensor(uint64_t number, int64_t batch, int64_t length, int64_t heads, int64_t head_dim,
                        const std::vector<Span>& spans) {
  int64_t count = 0;
  for (const Span& span : spans) count += span.count;
  at::Tensor drawn = at::empty({batch, count, heads, head_dim}, at::kFloat);
  auto* to = drawn.mutable_data_ptr<float>();
  for (int64_t b = 0; b < batch; ++b) {
    for (const Span& span : spans) {
      for (int64_t i = 0; i < span.count; ++i) {
        const uint64_t row = splitmix64(splitmix64(number) ^ static_cast<uint64_t>(b * length + span.at(i)));
        for (int64_t e = 0; e < heads * head_dim; ++e) {
          // 24 bits, as many as fp32 has.
          const uint64_t bits = splitmix64(row + kSplitmix64Step * static_cast<uint64_t>(e)) >> 40;
          *to++ = static_cast<float>(bits) * 0x1p-23F - 1;
        }
      }
    }
  }
  return drawn;
}

}  // namespace

PatternSpec six_blocks_a_row(int64_t) {
  return parse_pattern(
      "{ kind = 'blocks', map = 'bigbird', block = 128, window_blocks = 1, global_blocks = 0, random_blocks = 3, "
      "per_head = false }",
      "bench");
}

AttentionInputs drawn_inputs(const AttentionShape& s, int64_t head_dim, const std::vector<Span>& queries,
                             const std::vector<Span>& keys) {
  AttentionInputs in;
  in.q = drawn_tensor(0, s.batch, s.q_len, s.heads, head_dim, queries);
  in.k = drawn_tensor(1, s.batch, s.k_len, s.kv_heads, head_dim, keys);
  in.v = drawn_tensor(2, s.batch, s.k_len, s.kv_heads, head_dim, keys);
  in.dout = in.q;
  return in;
}

ResidentPeak::ResidentPeak() {
  malloc_trim(0);
  // Sets the high-water mark to what is resident now, since Linux 4.0.
  std::ofstream("/proc/self/clear_refs") << 5 << std::flush;
  before_ = bytes_in_status("VmRSS");
  works_ = before_ > 0 && bytes_in_status("VmHWM") <= before_ + (int64_t{1} << 20);
}

int64_t ResidentPeak::bytes() const { return works_ ? std::max<int64_t>(0, bytes_in_status("VmHWM") - before_) : 0; }

double held_over_two_blocks(const AttentionStats& forward, const AttentionStats* backward, const PlanRequest& request,
                            int64_t head_dim) {
  const double three = 3 * kv_bytes_of_part(request, head_dim) / 4.0;  // elements
  double over = static_cast<double>(forward.peak_kv_elements) / three;
  if (backward != nullptr) {
    over = std::max({over, static_cast<double>(backward->peak_kv_elements) / three,
                     static_cast<double>(backward->peak_grad_elements) / three});
  }
  return over;
}

RowsReport check_call(const CallWanted& wanted, const PatternSpec& ran, const AttendResults& mine, Communicator& comm) {
  const PlanRequest& request = wanted.request;
  const AttentionShape& shape = request.shape;
  AttendProblem problem;
  problem.asked = request.pattern;
  problem.pattern = ran;
  problem.shape = shape;
  problem.head_dim = wanted.head_dim;
  problem.scale = 1 / std::sqrt(static_cast<double>(wanted.head_dim));
  problem.queries = query_layout(request);
  problem.keys = key_layout(request);
  // The call was given the gradient of what it returned, the check is given that of the divided result.
  const auto divisor = static_cast<double>(output_divisor(ran));
  problem.inputs = [&shape, divisor, dim = wanted.head_dim](const auto& queries, const auto& keys) {
    const AttentionInputs in = drawn_inputs(shape, dim, queries, keys);
    return RandomTensors{in.q, in.k, in.v, in.dout.to(at::kDouble) * divisor};
  };
  return check_rows(comm, problem, mine, {.rows = wanted.check_rows});
}

CallFigures measure_call(const CallWanted& wanted, Communicator& comm) {
  const PlanRequest& request = wanted.request;
  const OpLabel label = {"bench seeds", 0};
  std::optional<ResidentPeak> resident;
  if (wanted.processes) resident.emplace();
  const AllocatedPeak allocated;
  const auto rank = static_cast<size_t>(comm.rank());
  AttentionCall call;
  call.request = request;
  call.comm = &comm;
  call.label = "bench seeds";
  ExecutorCall attention(
      drawn_inputs(request.shape, wanted.head_dim, query_layout(request).spans[rank], key_layout(request).spans[rank]),
      call);
  // A rank that is a thread counts its own CPU seconds.
  const auto cpu_now = [&] { return wanted.processes || comm.size() == 1 ? cpu_seconds() : thread_cpu_seconds(); };
  CallFigures figures;
  std::vector<double> forward_wall, forward_cpu, cpu;
  for (int64_t round = -1; round < wanted.rounds; ++round) {
    comm.barrier(label);
    const double begin_cpu = cpu_now(), begin = wall_seconds();
    attention.forward();
    const double wall = wall_seconds() - begin, forward = cpu_now() - begin_cpu;
    if (wanted.backward) attention.backward();
    const double all = cpu_now() - begin_cpu;
    const double longest = over_ranks(comm, {wall}, ReduceOp::kMax)[0];
    const std::vector<double> sums = over_ranks(comm, {forward, all}, ReduceOp::kSum);
    if (round < 0 && wanted.rounds > 0) continue;
    forward_wall.push_back(longest);
    forward_cpu.push_back(sums[0]);
    cpu.push_back(sums[1]);
  }
  const AttentionStats *there = &attention.forward_stats(),
                       *back = wanted.backward ? &attention.backward_stats() : nullptr;
  const double forward_held = 4.0 * static_cast<double>(there->peak_kv_elements);
  const double backward_held =
      back == nullptr ? 0 : 4.0 * static_cast<double>(back->peak_kv_elements + back->peak_grad_elements);
  const double added = resident ? static_cast<double>(resident->bytes()) : 0;
  // q, k, v and out, and their gradients, of as many heads as q has; then two blocks of keys and values, and of their
  // gradients.
  const double part = kv_bytes_of_part(request, wanted.head_dim);
  const double queries = static_cast<double>(request.shape.heads) / static_cast<double>(request.shape.kv_heads) * part;
  const double both = wanted.backward ? 2 : 1;
  const std::vector<double> most =
      over_ranks(comm,
                 {std::max(forward_held, backward_held), held_over_two_blocks(*there, back, request, wanted.head_dim),
                  static_cast<double>(allocated.bytes()), added, added / (both * (queries + part) + both * 2 * part)},
                 ReduceOp::kMax);
  figures.forward_wall = least(forward_wall);
  figures.forward_cpu = least(forward_cpu);
  figures.cpu = least(cpu);
  figures.held_bytes = most[0];
  figures.held_over = most[1];
  figures.allocated = most[2];
  figures.resident = most[3];
  figures.resident_over = most[4];
  if (wanted.check_rows > 0) {
    const PatternSpec& ran = attention.output().program().request.pattern;
    const int64_t divisor = output_divisor(ran);
    AttendResults mine;
    mine.out = divisor == 1 ? attention.output().out : attention.output().out / divisor;
    mine.lse = attention.output().lse;
    if (wanted.backward) {
      const AttentionGradients& gradients = attention.gradients();
      mine.dq = gradients.dq, mine.dk = gradients.dk, mine.dv = gradients.dv;
    }
    figures.check = check_call(wanted, ran, mine, comm);
  }
  return figures;
}

CallFigures measure_threads(const CallWanted& wanted) {
  CallFigures figures;
  run_ranks(wanted.request.ranks, [&](Communicator& comm) {
    const CallFigures mine = measure_call(wanted, comm);
    if (comm.rank() == 0) figures = mine;
  });
  return figures;
}

}  // namespace annulus
