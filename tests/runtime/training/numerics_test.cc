// Tests that the numeric settings reach LibTorch and the environment variable of cuBLAS.
#include "runtime/training/numerics.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace annulus::numerics_test {
namespace {

TEST(GpuNumerics, FollowTheLastCall) {
  const at::Context& context = at::globalContext();
  unsetenv("CUBLAS_WORKSPACE_CONFIG");
  set_gpu_numerics({.tf32 = true, .deterministic = false});
  EXPECT_TRUE(context.allowTF32CuBLAS());
  EXPECT_TRUE(context.allowTF32CuDNN());
  EXPECT_FALSE(context.deterministicAlgorithms());
  EXPECT_EQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), nullptr);
  set_gpu_numerics({.tf32 = false, .deterministic = true});
  EXPECT_FALSE(context.allowTF32CuBLAS());
  EXPECT_FALSE(context.allowTF32CuDNN());
  EXPECT_TRUE(context.deterministicAlgorithms());
  EXPECT_TRUE(context.deterministicCuDNN());
  EXPECT_FALSE(context.deterministicFillUninitializedMemory());
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
}

TEST(GpuNumerics, KeepTheUsersWorkspaceSetting) {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8", 1);
  set_gpu_numerics({.tf32 = false, .deterministic = true});
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":16:8");
  set_gpu_numerics({});
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
}

}  // namespace
}  // namespace annulus::numerics_test
