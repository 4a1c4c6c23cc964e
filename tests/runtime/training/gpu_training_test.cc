// Tests of a training step on a GPU: it rounds little more than one on a CPU, recorded as a CUDA graph or not; it
// resumes bit-identically; it waits for the device exactly once; it takes no more memory than planned. The tests are
// compiled and linked in every build and skipped where there is no GPU.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/gpu_precision.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/step_graph.h"
#include "runtime/training/training.h"
#include "tests/runtime/training/kept_state.h"
#include "tests/runtime/training/rounding_errors.h"
#include "tests/runtime/training/tiny_run.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#endif

namespace annulus {
namespace {

const at::Device kGpu(at::kCUDA, 0);

class GpuTraining : public ::testing::Test {
 protected:
  void SetUp() override {
#ifndef WITH_CUDA
    GTEST_SKIP() << "this is a build without CUDA (bazel test --config=cuda)";
#endif
    if (!at::hasCUDA() || at::detail::getCUDAHooks().deviceCount() == 0) GTEST_SKIP() << "this machine has no GPU";
  }

  // Heads of 64 and rows of a few hundred tokens are sizes that the fast kernels accept.
  Config config(const std::string& dtype) const {
    Config c = tiny_config(folder_);
    c.run.steps = 40;
    c.model.dim = 128;
    c.model.heads = 2;
    c.model.kv_heads = 1;
    c.model.ffn = 256;
    c.model.dtype = dtype;
    c.data.context = 256;
    c.data.batch = 2;
    c.deterministic = true;
    return c;
  }

  // Calls body(training) with a training of one rank.
  static void with_training(const Config& config, at::Device device, const std::function<void(Training&)>& body) {
    const Dataset data(config.data, config.run.seed, config.model.vocab);
    const std::shared_ptr<Communicator> world = make_self_communicator();
    Training training(config, *world, data, device);
    body(training);
  }

  struct Curve {
    std::vector<double> losses, norms;
    double validation = 0;
    std::string digest, notes;
    bool replays = false;
  };
  static Curve train(const Config& config, at::Device device, int64_t steps) {
    Curve curve;
    with_training(config, device, [&](Training& training) {
      for (int64_t i = 0; i < steps; ++i) {
        const StepResult r = training.step();
        EXPECT_TRUE(r.applied);
        curve.losses.push_back(r.loss);
        curve.norms.push_back(r.gradient_norm);
        curve.notes += r.note;
      }
      curve.validation = training.validate([] { return false; }).loss;
      curve.digest = training.weights_digest();
      curve.replays = training.replays();
    });
    return curve;
  }

  const TestFolder folder_;
};

// How many times the error of the CPU in the same dtype a GPU may have, both against fp64. In fp32 (TF32 off) attention
// multiplies in three parts of TF32 and drops their smallest product, 2^-22 or less of the result: up to four times
// what fp32 rounds. In bf16 it rounds probabilities and their gradients as well, which the CPU may keep in fp32.
// Another factor of 2 is for the chance that is left in a mean square over few runs.
constexpr double kOfTheCpu = 8;

TEST_F(GpuTraining, LosesLittleMoreToRoundingThanTheCpu) {
  const auto on = [](at::Device device) {
    return [device](const Config& c) { return first_steps(c, *make_self_communicator(), device); };
  };
  const std::vector<FirstSteps> exact = with_each_seed(config("fp64"), on(at::kCPU));
  for (const std::string dtype : {"fp32", "bf16"}) {
    const RoundingErrors cpu = errors_of(with_each_seed(config(dtype), on(at::kCPU)), exact);
    const RoundingErrors gpu = errors_of(with_each_seed(config(dtype), on(kGpu)), exact);
    RecordProperty(dtype + ", losses and gradients of CPU and GPU",
                   std::to_string(cpu.losses) + " " + std::to_string(cpu.gradients) + " " + std::to_string(gpu.losses) +
                       " " + std::to_string(gpu.gradients));
    EXPECT_LE(gpu.losses, kOfTheCpu * cpu.losses + roundoff(dtype)) << dtype;
    EXPECT_LE(gpu.gradients, kOfTheCpu * cpu.gradients) << dtype;
    const Curve curve = train(config(dtype), kGpu, 20);
    EXPECT_LT(curve.losses.back(), curve.losses[0] - 1) << "it learns";
  }
}

TEST_F(GpuTraining, ReplayedStepsEqualLaunchedSteps) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const bool recompute : {false, true}) {
      Config c = config(dtype);
      c.model.recompute = recompute;
      const Curve replayed = train(c, kGpu, 10);
      EXPECT_TRUE(replayed.replays) << replayed.notes;
      c.cuda_graphs = "off";
      const Curve run = train(c, kGpu, 10);
      EXPECT_FALSE(run.replays);
      EXPECT_EQ(replayed.losses, run.losses) << dtype;
      EXPECT_EQ(replayed.norms, run.norms) << dtype;
      EXPECT_EQ(replayed.digest, run.digest) << dtype;
    }
  }
}

// The kernel chosen by default is cuDNN's, which keeps its plans per thread and whose backward is not deterministic.
TEST_F(GpuTraining, RecordsStepsWithTheDefaultKernel) {
  for (const bool recompute : {false, true}) {
    Config c = config("bf16");
    c.deterministic = false;
    c.model.recompute = recompute;
    const Curve replayed = train(c, kGpu, 10);
    EXPECT_TRUE(replayed.replays) << replayed.notes;
    c.cuda_graphs = "off";
    const std::vector<double> exact = train(config("fp64"), at::kCPU, 10).losses;
    const double of_cpu = relative_error(train(config("bf16"), at::kCPU, 10).losses, exact);
    for (const Curve& gpu : {replayed, train(c, kGpu, 10)}) {
      EXPECT_LE(relative_error(gpu.losses, exact), kOfTheCpu * of_cpu + roundoff("bf16"));
    }
  }
}

// The recorded graph reads lists of rows on the device for as long as it exists.
TEST_F(GpuTraining, RecordsStepsWithGatheredPatterns) {
  for (const char* pattern :
       {"{ kind = \"dilated\", segment_lengths = [64, 128], dilation_rates = [1, 2], causal = true }",
        "{ kind = \"blocks\", map = \"local\", block = 32, window_blocks = 1, causal = true }"}) {
    Config c = config("bf16");
    c.model.pattern = parse_pattern(pattern, "test");
    const Curve replayed = train(c, kGpu, 10);
    EXPECT_TRUE(replayed.replays) << replayed.notes;
    c.cuda_graphs = "off";
    EXPECT_EQ(replayed.digest, train(c, kGpu, 10).digest) << pattern;
  }
}

// Validation, restored weights and requests to stop happen between replays.
TEST_F(GpuTraining, ReplaysStayCorrectAfterValidationRestoreAndStop) {
  with_training(config("bf16"), kGpu, [&](Training& training) {
    for (int i = 0; i < 6; ++i) training.step();
    KeptState kept;
    kept.keep(training);
    const double loss = training.validate([] { return false; }).loss;
    for (int i = 0; i < 4; ++i) training.step();
    const std::string straight = training.weights_digest();
    kept.restore(training);
    EXPECT_EQ(training.validate([] { return false; }).loss, loss);
    for (int i = 0; i < 4; ++i) training.step();
    EXPECT_EQ(training.weights_digest(), straight);
    EXPECT_TRUE(training.replays());
    EXPECT_TRUE(training.step(true).stop);
    EXPECT_FALSE(training.step().stop);
  });
}

TEST_F(GpuTraining, ResumesBitIdentically) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    const Config c = config(dtype);
    KeptState kept;
    std::string straight;
    with_training(c, kGpu, [&](Training& training) {
      for (int i = 0; i < 6; ++i) training.step();
      kept.keep(training);
      for (int i = 0; i < 6; ++i) training.step();
      straight = training.weights_digest();
    });
    with_training(c, kGpu, [&](Training& training) {
      kept.restore(training);
      for (int i = 0; i < 6; ++i) training.step();
      EXPECT_EQ(training.weights_digest(), straight) << dtype;
    });
  }
}

// Sums of n products are off by at most n roundings of the sum of their magnitudes, by 2^-24 each in fp32. TF32 also
// rounds both factors by 2^-11, so that its mean error is larger by about 2^13 / sqrt(n), here 256; a 16th of it is
// required.
TEST_F(GpuTraining, Tf32FollowsTheConfiguration) {
  constexpr int64_t kTerms = 1024;
  const at::Tensor a = at::randn({kTerms, kTerms}, kGpu), wide = a.to(at::kDouble);
  const at::Tensor exact = wide.mm(wide), magnitudes = wide.abs().mm(wide.abs());
  const auto errors = [&] { return (a.mm(a).to(at::kDouble) - exact).abs().div(magnitudes); };
  set_gpu_precision({.tf32 = true, .deterministic = false});
  const at::Tensor tf32 = errors();
  set_gpu_precision({.tf32 = false, .deterministic = false});
  const at::Tensor fp32 = errors();
  EXPECT_LE(fp32.max().item<double>(), kTerms * 0x1p-24);
  EXPECT_LE(tf32.max().item<double>(), kTerms * 0x1p-24 + 2.01 * 0x1p-11);
  EXPECT_GE(tf32.mean().item<double>(), 16 * fp32.mean().item<double>());
}

TEST_F(GpuTraining, DoesNotRecordStepsThatDiffer) {
  Config c = config("bf16");
  c.model.pattern = parse_pattern("{ kind = \"blocks\", map = \"adaptive\", block = 64, keep = 2 }", "test");
  EXPECT_FALSE(train(c, kGpu, 6).replays);
}

TEST_F(GpuTraining, RecordedStepRunsOncePerCall) {
  StepGraph graph(kGpu, true);
  const at::Tensor count = at::zeros({}, kGpu);
  for (int i = 0; i < 8; ++i) graph.run([&] { count.add_(at::ones({}, kGpu)); });
  EXPECT_TRUE(graph.recorded());
  EXPECT_EQ(graph.take_note(), "");
  EXPECT_EQ(count.item<float>(), 8);
}

TEST_F(GpuTraining, RunsStepsThatCannotBeRecorded) {
  StepGraph graph(kGpu, true);
  const at::Tensor count = at::zeros({}, kGpu);
  std::string notes;
  for (int i = 0; i < 8; ++i) {
    graph.run([&] { EXPECT_EQ(count.add_(at::ones({}, kGpu)).item<float>(), i + 1); });  // waits for the device
    notes += graph.take_note();
  }
  EXPECT_FALSE(graph.recorded());
  EXPECT_EQ(notes.find("CUDA graphs: a step cannot be recorded"), 0U) << notes;
  EXPECT_EQ(notes.rfind("CUDA graphs"), 0U) << "once";
  EXPECT_EQ(count.item<float>(), 8);
#ifdef WITH_CUDA
  // The memory that the failed recording took is given back.
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto reserved = [&] {
    c10::cuda::CUDACachingAllocator::emptyCache();
    return c10::cuda::CUDACachingAllocator::getDeviceStats(kGpu.index()).reserved_bytes[all].current;
  };
  const int64_t before = reserved();
  StepGraph large(kGpu, true);
  for (int i = 0; i < 6; ++i) large.run([&] { EXPECT_GT(at::ones({1 << 26}, kGpu).sum().item<float>(), 0); });
  EXPECT_FALSE(large.recorded());
  EXPECT_LE(reserved(), before + (8 << 20));
#endif
  // The device, the allocator and the random generator still work.
  EXPECT_NO_THROW(at::randn({4}, kGpu));
  EXPECT_EQ(at::ones({64, 64}, kGpu).mm(at::ones({64, 64}, kGpu)).sum().item<float>(), 64 * 64 * 64);
}

#ifdef WITH_CUDA

struct SyncDebugMode {
  SyncDebugMode() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~SyncDebugMode() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

// In this mode LibTorch throws in each of its calls that waits for the device. The readout of a step waits for an
// event, which is not such a call.
TEST_F(GpuTraining, NoOperatorWaitsForTheDevice) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const bool recompute : {false, true}) {
      Config c = config(dtype);
      c.model.recompute = recompute;
      c.cuda_graphs = "off";
      c.deterministic = recompute;  // with cuDNN, and without
      with_training(c, kGpu, [&](Training& training) {
        for (int i = 0; i < 2; ++i) training.step();
        const SyncDebugMode guard;
        EXPECT_ANY_THROW(at::ones({}, kGpu).item<float>()) << "the mode is on";
        for (int i = 0; i < 3; ++i) EXPECT_NO_THROW(training.step()) << dtype;
      });
    }
  }
}

// The number of CUDA calls that begin within a step, by name.
std::map<std::string, int> calls_of_a_step(Training& training) {
  using torch::profiler::impl::ActivityType;
  namespace profiler = torch::autograd::profiler;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CPU, ActivityType::CUDA};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  {
    RECORD_USER_SCOPE("annulus::step");
    training.step();
  }
  const std::unique_ptr<profiler::ProfilerResult> trace = profiler::disableProfiler();
  uint64_t begin = 0, end = 0;
  for (const profiler::KinetoEvent& event : trace->events()) {
    if (event.name() == "annulus::step" && event.deviceType() == at::kCPU) begin = event.startNs(), end = event.endNs();
  }
  std::map<std::string, int> calls;
  for (const profiler::KinetoEvent& event : trace->events()) {
    // Stopping the profiler also waits for the device, but after the step.
    if (event.startNs() >= begin && event.startNs() < end) ++calls[event.name()];
  }
  return calls;
}

TEST_F(GpuTraining, WaitsForTheDeviceOncePerStep) {
  for (const std::string graphs : {"off", "auto"}) {
    Config c = config("bf16");
    c.cuda_graphs = graphs;
    c.deterministic = false;
    with_training(c, kGpu, [&](Training& training) {
      for (int i = 0; i < 6; ++i) training.step();
      std::map<std::string, int> calls = calls_of_a_step(training);
      int launches = 0;
      for (const auto& [name, count] : calls) {
        const bool launch = name.rfind("cudaLaunchKernel", 0) == 0 || name.rfind("cuLaunchKernel", 0) == 0;
        launches += launch || name == "cudaGraphLaunch" ? count : 0;
      }
      if (launches == 0) GTEST_SKIP() << "the profiler sees no call of CUDA on this machine";
      EXPECT_EQ(calls["cudaDeviceSynchronize"], 0);
      EXPECT_EQ(calls["cudaStreamSynchronize"], 0);
      EXPECT_EQ(calls["cudaMemcpy"], 0);
      EXPECT_EQ(calls["cudaEventSynchronize"], 1);
      EXPECT_EQ(calls["cudaGraphLaunch"], graphs == "auto" ? 1 : 0);
    });
  }
}

TEST_F(GpuTraining, TakesNoMoreMemoryThanPlanned) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    for (const bool recompute : {false, true}) {
      Config c = config(dtype);
      c.deterministic = false;
      c.cuda_graphs = "off";
      c.model.layers = 6;
      c.model.dim = 1024;
      c.model.heads = c.model.kv_heads = 8;
      c.model.ffn = 4096;
      c.model.recompute = recompute;
      c.data.context = 8192;
      c.data.batch = 1;
      c.data.validation_fraction = 0;
      const MemoryPlan plan = plan_memory(c, check_training(c, 1), {}, 1, 0, RanksAre::kGpus);
      at::ones({}, kGpu);  // there are no counters before the first tensor
      c10::cuda::CUDACachingAllocator::emptyCache();
      c10::cuda::CUDACachingAllocator::resetPeakStats(kGpu.index());
      const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
      const auto bytes = [&] {
        return c10::cuda::CUDACachingAllocator::getDeviceStats(kGpu.index()).allocated_bytes[all];
      };
      const int64_t before = bytes().current;
      with_training(c, kGpu, [](Training& training) {
        training.step();
        training.step();
      });
      const auto peak = static_cast<double>(bytes().peak - before);
      EXPECT_LE(peak, 1.1 * static_cast<double>(plan.total())) << dtype << recompute << ": " << plan.text();
      EXPECT_GE(peak, static_cast<double>(plan.total()) / 1.1) << dtype << recompute << ": " << plan.text();
      RecordProperty("peak_bytes_" + dtype + (recompute ? "_recomputed" : ""), std::to_string(bytes().peak - before));
    }
  }
}

#endif  // WITH_CUDA

}  // namespace
}  // namespace annulus
