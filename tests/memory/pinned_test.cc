// Tests of memory/pinned.h on a CPU, where nothing is copied. tests/runtime/training/gpu_training_test.cc tests it with
// a GPU.
#include "memory/pinned.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace annulus::pinned_test {
namespace {

TEST(Pinned, OnACpuNothingIsPinnedOrCopied) {
  const at::Tensor host = host_memory({2, 3}, at::kLong, at::kCPU);
  EXPECT_FALSE(host.is_pinned());
  EXPECT_EQ(host.sizes(), at::IntArrayRef({2, 3}));
  host.fill_(7);
  const at::Tensor target = at::zeros({2, 3}, at::kLong);
  send(host, target);
  EXPECT_EQ(target.sum().item<int64_t>(), 0);
}

TEST(Pinned, OnACpuReadbackReturnsTheTensorItself) {
  Readback readback({3}, at::kFloat, at::kCPU);
  const at::Tensor values = at::arange(3, at::kFloat);
  readback.start(values);
  EXPECT_TRUE(readback.ready());
  EXPECT_TRUE(readback.wait().is_same(values));
  const at::Tensor others = at::arange(3, at::kFloat);
  readback.start(others);
  EXPECT_TRUE(readback.wait().is_same(others));
}

}  // namespace
}  // namespace annulus::pinned_test
