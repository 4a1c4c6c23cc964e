// Tests that the numeric settings of GPUs reach LibTorch and the environment variable of cuBLAS, and that peak rates
// are known only for devices with certain exact names.
#include "runtime/training/gpu_precision.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "runtime/training/device_peak.h"

namespace annulus::gpu_precision_test {
namespace {

TEST(GpuPrecision, FollowTheLastCall) {
  const at::Context& context = at::globalContext();
  unsetenv("CUBLAS_WORKSPACE_CONFIG");
  set_gpu_precision({.tf32 = true, .deterministic = false});
  EXPECT_TRUE(context.allowTF32CuBLAS());
  EXPECT_TRUE(context.allowTF32CuDNN());
  EXPECT_FALSE(context.deterministicAlgorithms());
  EXPECT_EQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), nullptr);
  set_gpu_precision({.tf32 = false, .deterministic = true});
  EXPECT_FALSE(context.allowTF32CuBLAS());
  EXPECT_FALSE(context.allowTF32CuDNN());
  EXPECT_TRUE(context.deterministicAlgorithms());
  EXPECT_TRUE(context.deterministicCuDNN());
  EXPECT_FALSE(context.deterministicFillUninitializedMemory());
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
}

TEST(GpuPrecision, KeepTheUsersWorkspaceSetting) {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8", 1);
  set_gpu_precision({.tf32 = false, .deterministic = true});
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":16:8");
  set_gpu_precision({});
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
}

TEST(DevicePeak, IsKnownByDeviceAndDtype) {
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kBFloat16, false), 989.5e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kFloat, true), 494.5e12);
  EXPECT_EQ(peak_flops("NVIDIA H200", at::kFloat, false), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", at::kBFloat16, true), 312e12);
}

TEST(DevicePeak, IsEmptyForUnknownDevices) {
  for (const char* name : {"", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H100", "NVIDIA GeForce RTX 4090 Laptop GPU",
                           "NVIDIA A10G", "NVIDIA H300"}) {
    EXPECT_FALSE(peak_flops(name, at::kBFloat16, false)) << name;
  }
  EXPECT_FALSE(peak_flops("NVIDIA H200", at::kDouble, false));
}

}  // namespace
}  // namespace annulus::gpu_precision_test
