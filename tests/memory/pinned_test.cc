// What travels between host and device; on a CPU nothing does. With a GPU: tests/training/gpu_training_test.cc.
#include "memory/pinned.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace annulus {
namespace {

TEST(Pinned, OnACpuTheHostWritesTheTargetItself) {
  const at::Tensor target = at::zeros({2, 3}, at::kLong);
  const at::Tensor host = host_side(target);
  EXPECT_TRUE(host.is_same(target));
  host.fill_(7);
  send(host, target);
  EXPECT_EQ(target.sum().item<int64_t>(), 42);
}

TEST(Pinned, OnACpuWhatIsReadBackIsTheTensorItself) {
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
}  // namespace annulus
