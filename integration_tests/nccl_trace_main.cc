// Runs attention over the ranks of mpirun on GPUs, under LibTorch's profiler (CUPTI), and checks the trace: transfers
// run on a stream without computation and at the same time as tiles; the host never waits for the device and copies
// nothing from pageable memory, which would wait as well. Prints a line for each violation and exits with 1. Without a
// GPU it prints "SKIPPED: reason".
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/nccl/nccl_communicator.h"
#include "tests/comm/gpu_count.h"

namespace annulus {
namespace {

constexpr char kScope[] = "annulus: one call";
constexpr int64_t kLength = 16384;  // of the whole sequence; tiles then take some tenths of a millisecond

using torch::autograd::profiler::KinetoEvent;

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

struct Trace {
  std::vector<std::pair<uint64_t, uint64_t>> transfers, tiles;  // [begin, end) in ns
  std::set<int64_t> transfer_streams, compute_streams;
  std::vector<std::string> waits;  // waiting calls of the host, and copies from pageable memory
};

Trace read(const std::vector<KinetoEvent>& events) {
  Trace trace;
  uint64_t begin = 0, end = 0;
  for (const KinetoEvent& e : events) {
    if (e.name() == kScope && e.deviceType() == c10::DeviceType::CPU) {
      begin = e.startNs();
      end = e.endNs();
    }
  }
  for (const KinetoEvent& e : events) {
    const std::string name = e.name();
    if (e.deviceType() == c10::DeviceType::CPU) {
      const bool waits = name.find("Synchronize") != std::string::npos || name == "cudaMemcpy";
      if (waits && e.startNs() >= begin && e.startNs() < end) trace.waits.push_back(name);
      continue;
    }
    if (name == kScope) continue;  // the device's record of the same scope
    if (name.find("Pageable") != std::string::npos) trace.waits.push_back(name);
    if (begins(name, "Memcpy") || begins(name, "Memset")) continue;
    const bool transfer = begins(name, "nccl");
    (transfer ? trace.transfers : trace.tiles).emplace_back(e.startNs(), e.endNs());
    (transfer ? trace.transfer_streams : trace.compute_streams).insert(e.deviceResourceId());
  }
  return trace;
}

// The number of transfers during which some kernel runs.
size_t hidden(const Trace& trace) {
  return static_cast<size_t>(std::count_if(trace.transfers.begin(), trace.transfers.end(), [&](const auto& transfer) {
    return std::any_of(trace.tiles.begin(), trace.tiles.end(), [&](const auto& tile) {
      return std::max(transfer.first, tile.first) < std::min(transfer.second, tile.second);
    });
  }));
}

// The number of exchanges for which the plan has tiles to compute meanwhile.
size_t to_be_hidden(const Program& program) {
  size_t n = 0;
  for (const std::vector<Step>* steps : {&program.forward, &program.backward}) {
    for (const Step& step : *steps) n += !(step.sends.empty() && step.receives.empty()) && !step.tiles.empty();
  }
  return n;
}

// Nanoseconds in which transfers and kernels run at the same time; an upper bound.
uint64_t overlap(const Trace& trace) {
  uint64_t sum = 0;
  for (const auto& [a, b] : trace.transfers) {
    for (const auto& [c, d] : trace.tiles) {
      if (std::max(a, c) < std::min(b, d)) sum += std::min(b, d) - std::max(a, c);
    }
  }
  return sum;
}

int run() {
  const LaunchInfo launch = launch_info();
  if (const std::string why = comm_test::unavailable_to_processes(launch.local_size); !why.empty()) {
    if (launch.rank == 0) std::printf("SKIPPED: %s\n", why.c_str());
    return 0;
  }
  const int gpu = comm_test::gpu_of_process(launch.local_rank, launch.local_size);
  comm_test::use_gpu(gpu);
  Job job = bootstrap({.fingerprint = {}, .device = "cuda"});
  const std::shared_ptr<Communicator> comm =
      make_nccl_communicator(*job.world, {.device = gpu, .timeout = Seconds(60)});
  comm->set_timeout(Seconds(60));

  AttentionCall call;
  call.request.pattern = parse_pattern("{ kind = \"causal\" }", "pattern");
  call.request.shape = {.batch = 1, .heads = 8, .kv_heads = 8, .q_len = kLength, .k_len = kLength, .query_offset = 0};
  call.request.layout = parse_layout("zigzag", "layout");
  call.request.schedule = parse_schedule("ring", "schedule");
  call.request.ranks = job.size;
  call.comm = comm.get();
  const auto options =
      at::TensorOptions().dtype(at::kBFloat16).device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu)));
  const auto make = [&] { return at::randn({1, kLength / job.size, 8, 128}, options); };
  const at::Tensor q = make(), k = make(), v = make(), dout = make();
  std::shared_ptr<const RankPlan> plan;
  const auto attend = [&] {
    const AttentionOutput out = attention_forward(q, k, v, call);
    plan = out.call.plan();
    return attention_backward(dout, q, k, v, out);
  };
  attend();  // the first call connects, plans and loads kernels
  attend();
  c10::cuda::device_synchronize();
  job.world->barrier({"the trace begins", 0});

  using namespace torch::profiler::impl;
  using namespace torch::autograd::profiler;
  const ProfilerConfig config(ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CPU, ActivityType::CUDA};
  prepareProfiler(config, activities);
  enableProfiler(config, activities);
  {
    RECORD_USER_SCOPE(kScope);
    attend();
  }
  c10::cuda::device_synchronize();
  const std::unique_ptr<ProfilerResult> result = disableProfiler();
  comm->progress();
  const Trace trace = read(result->events());

  if (trace.transfers.empty() && trace.tiles.empty()) {
    if (job.rank == 0) std::printf("SKIPPED: the profiler sees no kernel on this machine\n");
    comm->barrier({"the trace ends", 0});
    return 0;
  }
  int wrong = 0;
  const auto require = [&](bool good, const std::string& what) {
    if (good) return;
    std::printf("rank %d: %s\n", job.rank, what.c_str());
    wrong = 1;
  };
  require(!trace.transfers.empty(), "the trace shows no transfer");
  require(!trace.tiles.empty(), "the trace shows no kernel that computes");
  require(trace.transfer_streams.size() == 1, "expected transfers on one stream, got several");
  for (const int64_t stream : trace.transfer_streams) {
    require(trace.compute_streams.count(stream) == 0, "transfers share stream " + std::to_string(stream));
  }
  for (const std::string& wait : trace.waits) require(false, "the call waits for the device: " + wait);
  const uint64_t together = overlap(trace);
  require(together > 0, "no transfer runs while a tile is computed");
  // Ranks that share a GPU take turns on it, so this is checked only if each has its own.
  if (const size_t wanted = to_be_hidden(plan->program); launch.local_size <= comm_test::gpu_count()) {
    require(hidden(trace) >= wanted, "of " + std::to_string(wanted) + " transfers that the plan gives tiles to hide " +
                                         "behind " + std::to_string(hidden(trace)) + " run beside kernels");
  }
  uint64_t sending = 0;
  for (const auto& [a, b] : trace.transfers) sending += b - a;
  if (job.rank == 0 && wrong == 0) {
    std::printf("transfers and computation overlap: %zu transfers take %.3f ms, %.3f ms of them beside kernels\n",
                trace.transfers.size(), static_cast<double>(sending) * 1e-6, static_cast<double>(together) * 1e-6);
  }
  comm->barrier({"the trace ends", 0});
  return wrong;
}

}  // namespace
}  // namespace annulus

int main() {
  try {
    return annulus::run();
  } catch (const annulus::ReportedError& e) {
    return e.exit_code();
  } catch (const annulus::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return e.exit_code();
  }
}
