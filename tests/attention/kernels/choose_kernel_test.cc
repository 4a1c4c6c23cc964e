// Tests of the choice of a kernel and its reason, on CPUs and, by given abilities of a GPU, without one. Also tests the
// memory that the CPU kernel declares.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/detect.h"
#include "common/error.h"
#include "common/simd/instruction_set.h"

namespace annulus::choose_kernel_test {
namespace {

TEST(ChooseKernel, GivesItsReason) {
  const KernelChoice fp32 = choose_kernel(KernelKind::kAuto, at::kCPU, at::kFloat, 64, false);
  EXPECT_EQ(fp32.kind, KernelKind::kCpu);
  EXPECT_NE(fp32.reason.find("CPU"), std::string::npos);
  // The CPU kernel draws dropout within its tiles; LibTorch's operator cannot.
  const std::string dropping = choose_kernel(KernelKind::kAuto, at::kCPU, at::kHalf, 64, true).reason;
  EXPECT_EQ(dropping.find("dense"), std::string::npos) << dropping;
  EXPECT_NE(choose_kernel(KernelKind::kEfficient, at::kCPU, at::kHalf, 64, true).reason.find("falls back"),
            std::string::npos);
  // So it is with a soft cap of the scores.
  const std::string capping = choose_kernel(KernelKind::kAuto, at::kCPU, at::kHalf, 64, false, true).reason;
  EXPECT_EQ(capping.find("dense"), std::string::npos) << capping;
  EXPECT_NE(choose_kernel(KernelKind::kEfficient, at::kCPU, at::kHalf, 64, false, true).reason.find("a soft cap falls"),
            std::string::npos);
  EXPECT_EQ(choose_kernel(KernelKind::kReference, at::kCUDA, at::kFloat, 64, false).kind, KernelKind::kReference);
  EXPECT_THROW(choose_kernel(KernelKind::kAuto, at::kCPU, at::kLong, 64, false), Error);
  EXPECT_THROW(choose_kernel(KernelKind::kCudnn, at::kCPU, at::kFloat, 64, false), Error);
  EXPECT_EQ(choose_kernel(KernelKind::kEfficient, at::kCPU, at::kFloat, 64, false).kind, KernelKind::kEfficient);
  EXPECT_EQ(detected_kernels().size(), 5u);
}

// AMX and AVX-512 BF16 multiply pairs of bf16, and nothing else.
TEST(ChooseKernel, SaysWhatIsComputedInFp32) {
  const auto reason = [](at::ScalarType type, int64_t head_dim) {
    return choose_kernel(KernelKind::kCpu, at::kCPU, type, head_dim, false).reason;
  };
  const std::string best = instruction_set_name(instruction_set());
  const bool pairs = best == "AMX" || best == "AVX-512 BF16";
  const std::string pair_of = pairs ? best : "in fp32", others = pairs ? "AVX-512" : best;
  EXPECT_TRUE(reason(at::kBFloat16, 64).ends_with(pair_of)) << reason(at::kBFloat16, 64);
  EXPECT_TRUE(reason(at::kBFloat16, 63).ends_with(others + "; computes BFloat16 in fp32")) << reason(at::kBFloat16, 63);
  EXPECT_TRUE(reason(at::kHalf, 64).ends_with(others + "; computes Half in fp32")) << reason(at::kHalf, 64);
  EXPECT_TRUE(reason(at::kFloat, 64).ends_with(others)) << reason(at::kFloat, 64);
}

TEST(ChooseKernel, FollowsTheAbilitiesOfTheGpu) {
  GpuAbilities h200{"NVIDIA H200", 90, 91900, 132, true, "not loaded"};
  const auto chosen = [](const GpuAbilities& gpu, at::ScalarType type, int64_t head_dim,
                         KernelKind asked = KernelKind::kAuto) {
    return choose_gpu_kernel(asked, gpu, type, head_dim, false).kind;
  };
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128), KernelKind::kCudnn);
  EXPECT_EQ(chosen(h200, at::kHalf, 256), KernelKind::kFlash2);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 260), KernelKind::kEfficient);
  EXPECT_EQ(chosen(h200, at::kFloat, 64), KernelKind::kEfficient);
  EXPECT_EQ(chosen(h200, at::kDouble, 64), KernelKind::kReference);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128, KernelKind::kFlash2), KernelKind::kFlash2);
  h200.flash3_obstacle = "";
  EXPECT_EQ(chosen(h200, at::kBFloat16, 128), KernelKind::kFlash3);
  const GpuAbilities a100{"NVIDIA A100-SXM4-80GB", 80, 91900, 108, true, ""};
  EXPECT_EQ(chosen(a100, at::kBFloat16, 128), KernelKind::kCudnn);
  EXPECT_EQ(chosen(a100, at::kBFloat16, 129), KernelKind::kFlash2);
  const GpuAbilities old_cudnn{"NVIDIA H100", 90, 91002, 132, true, "not loaded"};
  EXPECT_EQ(chosen(old_cudnn, at::kBFloat16, 128), KernelKind::kFlash2);
  const GpuAbilities t4{"Tesla T4", 75, 91900, 40, true, ""};
  EXPECT_EQ(chosen(t4, at::kHalf, 64), KernelKind::kEfficient);
  EXPECT_EQ(chosen(t4, at::kBFloat16, 64), KernelKind::kReference);
  for (const auto& [kind, type, why] : {std::tuple{KernelKind::kCpu, at::kFloat, "CPUs"},
                                        {KernelKind::kCudnn, at::kFloat, "bf16 and fp16"},
                                        {KernelKind::kFlash3, at::kHalf, "capability 8.0"}}) {
    try {
      chosen(t4, type, 64, kind);
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("auto"), std::string::npos) << error.what();
    }
  }
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  EXPECT_EQ(chosen(h200, at::kBFloat16, 256), KernelKind::kFlash2);
  EXPECT_EQ(chosen(a100, at::kBFloat16, 128), KernelKind::kFlash2);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);  // the same operators may compute
  EXPECT_EQ(chosen(a100, at::kBFloat16, 128), KernelKind::kCudnn);
  at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  const std::string reason = choose_gpu_kernel(KernelKind::kAuto, old_cudnn, at::kBFloat16, 128, false).reason;
  EXPECT_NE(reason.find("9.15.1"), std::string::npos) << reason;  // why the faster kernel is not chosen
}

// Each thread has its own scratch. In the backward, all but one of the threads that share a kv head also have their own
// dq.
TEST(ChooseKernel, CpuKernelChargesTheScratchOfItsThreads) {
  const std::unique_ptr<Kernel> kernel = make_chosen_kernel(KernelKind::kCpu, at::kCPU, at::kFloat);
  const auto charged = [&](int threads, int64_t kv_heads, When when) {
    at::set_num_threads(threads);
    int64_t bytes = 0;
    for (const Charge& charge : kernel->charges(
             {.batch = 1, .queries = 5000, .heads = 4, .kv_heads = kv_heads, .head_dim = 64, .keys = 5000})) {
      if (charge.when == when) bytes += charge.bytes;
    }
    at::set_num_threads(1);
    return bytes;
  };
  constexpr int64_t kElement = 64 * 4, kDq = 5000 * 4 * kElement;          // rows of 64 fp32
  constexpr int64_t kForward = 2 * (1024 + 256) * kElement;                // q, out; k, v
  constexpr int64_t kBackward = (3 * 1024 + 5 * 256) * kElement + 262144;  // and 2 x 128 x 256 scores
  EXPECT_EQ(charged(1, 1, When::kForward), kForward);
  EXPECT_EQ(charged(4, 1, When::kForward), 4 * kForward);
  const int64_t alone = charged(1, 1, When::kBackward);
  EXPECT_EQ(charged(4, 1, When::kBackward) - alone, 3 * kBackward + 3 * kDq);
  EXPECT_EQ(charged(4, 2, When::kBackward) - alone, 3 * kBackward + 3 * kDq / 2);
}

}  // namespace
}  // namespace annulus::choose_kernel_test
