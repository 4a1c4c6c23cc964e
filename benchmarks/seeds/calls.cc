// Implements calls.h.
#include "benchmarks/seeds/calls.h"

#include <ATen/ops/empty.h>
#include <malloc.h>

#include <algorithm>
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

// Uniform numbers, which are quicker to draw than normal ones. The gradient of the result has the values of q.
AttentionInputs drawn(const AttentionShape& s, int64_t head_dim) {
  const auto made = [&](int64_t rows, int64_t heads) {
    return at::empty({s.batch, rows, heads, head_dim}, at::kFloat).uniform_(-1, 1);
  };
  AttentionInputs in;
  in.q = made(s.q_len, s.heads);
  in.k = made(s.k_len, s.kv_heads);
  in.v = made(s.k_len, s.kv_heads);
  in.dout = in.q;
  return in;
}

}  // namespace

PatternSpec six_blocks_a_row(int64_t) {
  return parse_pattern(
      "{ kind = 'blocks', map = 'bigbird', block = 128, window_blocks = 1, global_blocks = 0, random_blocks = 3, "
      "per_head = false }",
      "bench");
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

CallFigures measure_call(const CallWanted& wanted, Communicator& comm) {
  const PlanRequest& request = wanted.request;
  const OpLabel label = {"bench seeds", 0};
  std::optional<ResidentPeak> resident;
  if (wanted.processes) resident.emplace();
  const AllocatedPeak allocated;
  AttentionShape mine = request.shape;
  mine.q_len = query_layout(request).count(comm.rank());
  mine.k_len = key_layout(request).count(comm.rank());
  AttentionCall call;
  call.request = request;
  call.comm = &comm;
  call.label = "bench seeds";
  ExecutorCall attention(drawn(mine, wanted.head_dim), call);
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
