// Tests the kernels for CPUs with awkward lengths, head sizes, windows and rows without keys. gpu_kernel_test.cc does
// the same for GPUs.
#include "tests/attention/kernels/lengths.h"

#include <gtest/gtest.h>

#include "tests/attention/kernels/operator_calls.h"

namespace annulus::lengths_test {
namespace {

void expect_right(KernelKind kernel, at::ScalarType type, int64_t heads, int64_t kv_heads, int64_t dim) {
  for (const testing::LengthCase& c : testing::length_cases(heads, kv_heads, dim, 704)) {
    EXPECT_EQ(testing::check_length(c, kernel, at::kCPU, type), "");
  }
}

TEST(Lengths, ComposedLibTorchOperator) {
  const testing::OperatorCalls calls = testing::calls_during([] {
    expect_right(KernelKind::kEfficient, at::kFloat, 8, 1, 64);
    expect_right(KernelKind::kEfficient, at::kBFloat16, 2, 2, 96);
    expect_right(KernelKind::kEfficient, at::kDouble, 2, 1, 20);
  });
  EXPECT_EQ(calls.size(), 1u) << testing::text_of(calls);
  EXPECT_EQ(calls.count("cpu_flash"), 1u) << testing::text_of(calls);
}

TEST(Lengths, CpuKernel) {
  const testing::OperatorCalls calls = testing::calls_during([] {
    expect_right(KernelKind::kCpu, at::kFloat, 8, 1, 64);
    expect_right(KernelKind::kCpu, at::kHalf, 2, 2, 96);
    expect_right(KernelKind::kCpu, at::kBFloat16, 2, 2, 96);
  });
  EXPECT_EQ(testing::text_of(calls), "none");  // it computes by itself
}

TEST(Lengths, ReferenceKernel) { expect_right(KernelKind::kReference, at::kFloat, 2, 1, 20); }

}  // namespace
}  // namespace annulus::lengths_test
