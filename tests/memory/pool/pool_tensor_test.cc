// Tests tensors whose memory comes from the pool of the process.
#include "memory/pool/pool_tensor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "memory/peak_bytes.h"

namespace annulus::pool_tensor_test {
namespace {

PoolStats scratch() { return Pool::process().reports()[static_cast<size_t>(PoolPurpose::kScratch)].stats; }

at::Tensor tensor_of(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return pool_tensor(sizes, at::TensorOptions(type), PoolPurpose::kScratch);
}

TEST(PoolTensor, TakesAndReturnsItsMemory) {
  const PoolStats before = scratch();
  const void* memory = nullptr;
  {
    const at::Tensor tensor = tensor_of({3, 1000}), part = tensor.narrow(0, 1, 1);
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({3, 1000}));
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_EQ(scratch().in_use - before.in_use, class_bytes(size_class(12'000)));
    memory = tensor.const_data_ptr();
  }
  EXPECT_EQ(scratch().in_use, before.in_use);
  EXPECT_EQ(tensor_of({3000}).const_data_ptr(), memory);
  EXPECT_EQ(tensor_of({0, 4}).numel(), 0);
  EXPECT_EQ(scratch().taken - before.taken, 1);
}

TEST(PoolTensor, BehavesLikeAnyTensor) {
  at::Tensor tensor = tensor_of({10'000}, at::kDouble);
  tensor.fill_(2);
  tensor.resize_({40'000}).narrow(0, 10'000, 30'000).fill_(2);
  EXPECT_EQ(tensor.sum().item<double>(), 80'000);
  at::Tensor weight = tensor_of({4});
  weight.fill_(3).requires_grad_(true);
  (weight * at::ones({4})).sum().backward();
  EXPECT_EQ(weight.grad()[3].item<float>(), 1);
}

// Any thread may be the last to hold it, and LibTorch's own means count its bytes.
TEST(PoolTensor, IsCountedAndFreedByAnyThread) {
  const auto bytes = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
  const int64_t before = scratch().in_use;
  at::Tensor tensor = tensor_of({5000});
  EXPECT_EQ(bytes->alive(), 20'000);
  std::thread([&, bytes, there = std::move(tensor)]() mutable {
    const c10::DebugInfoGuard of_thread(c10::DebugInfoKind::PROFILER_STATE, bytes);
    there.reset();
  }).join();
  EXPECT_EQ(bytes->alive(), 0);
  EXPECT_EQ(scratch().in_use, before);
}

}  // namespace
}  // namespace annulus::pool_tensor_test
