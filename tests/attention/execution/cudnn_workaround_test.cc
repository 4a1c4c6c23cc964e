// Tests that attention switches off a setting of LibTorch with which gradients would be wrong.
#include "attention/execution/cudnn_workaround.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "attention/plan/plan.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::cudnn_workaround_test {
namespace {

constexpr const char* kVariable = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE";

TEST(CudnnWorkaround, OnlyTheWrongValueIsReplaced) {
  unsetenv(kVariable);
  EXPECT_FALSE(avoid_wrong_gradients());
  EXPECT_EQ(std::getenv(kVariable), nullptr);
  setenv(kVariable, "1", 1);
  EXPECT_TRUE(avoid_wrong_gradients());
  EXPECT_STREQ(std::getenv(kVariable), "0");
  EXPECT_FALSE(avoid_wrong_gradients());
}

// So that programs of others that call attention in C++ have right gradients as well.
TEST(CudnnWorkaround, AttentionReplacesIt) {
  setenv(kVariable, "1", 1);
  PlanRequest request;
  request.shape = {.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 8, .k_len = 8};
  testing::run_everywhere(request, testing::random_inputs(request.shape, 4, at::kDouble), KernelKind::kAuto);
  EXPECT_STREQ(std::getenv(kVariable), "0");
}

}  // namespace
}  // namespace annulus::cudnn_workaround_test
