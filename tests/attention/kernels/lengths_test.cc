// Tests the kernels for CPUs with awkward lengths, head sizes, windows and rows without keys, as gpu_kernel_test.cc
// does for GPUs, and how exact sums over many rows and keys are.
#include "tests/attention/kernels/lengths.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <utility>

#include "tests/attention/kernels/kernel_case.h"
#include "tests/attention/kernels/operator_calls.h"
#include "tests/attention/kernels/plain_attention.h"

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

// How far `got` is from the exact numbers, relative to their size: both in the root of the mean square, which differs
// less from case to case than the largest error.
double relative_error(const at::Tensor& got, const at::Tensor& exact) {
  const at::Tensor off = got.to(at::kDouble).reshape(exact.sizes()) - exact;
  return (off.square().sum() / exact.square().sum()).sqrt().item<double>();
}

// An error may grow with the number of query rows, whose products dk and dv are the sums of, and of keys (out, dq), but
// not by more than that of LibTorch's operator, whose products add up blocks of some hundred rows or keys each. A few
// keys or a few query rows suffice, so that the exact results cost little.
TEST(Lengths, SumsOverManyRowsAndKeysAreAsExactAsLibTorchs) {
  constexpr double kTimes = 1.5;
  constexpr int64_t kFew = 32, kDim = 16;
  at::set_num_threads(1);
  for (const int64_t many : {1000, 4000, 32000, 250000}) {
    for (const auto& [n, m] : {std::pair<int64_t, int64_t>{many, kFew}, {kFew, many}}) {
      testing::Case c;
      const auto draw = [](int64_t rows) { return at::randn({1, rows, 1, kDim}); };
      c.q = draw(n), c.dout = draw(n);
      c.keys = {draw(m), draw(m), {0, 1, 1}, {0, 1, 1}};
      c.grad_batch = c.grad_heads = {0, 1, 1}, c.grad_rows = m;
      c.call.scale = 1 / std::sqrt(static_cast<double>(kDim));
      Tile tile;
      tile.batch = tile.heads = {0, 1, 1};
      tile.query_rows = tile.query_positions = {0, 1, n};
      tile.key_rows = tile.key_positions = tile.grad_rows = {0, 1, m};
      c.tiles = {tile};
      const auto rows = [](const at::Tensor& t) { return t.view({-1, kDim}); };
      const OracleResult exact = testing::plain_attention(
          {rows(c.q), rows(c.keys.k), rows(c.keys.v), rows(c.dout), at::zeros({n, m}), {}, c.call.scale}, at::kDouble,
          at::kDouble);
      const testing::Result library = run(c, KernelKind::kEfficient), got = run(c, KernelKind::kCpu);
      for (const auto& [name, result] : {std::pair<const char*, at::Tensor OracleResult::*>{"out", &OracleResult::out},
                                         {"lse", &OracleResult::lse},
                                         {"dq", &OracleResult::dq},
                                         {"dk", &OracleResult::dk},
                                         {"dv", &OracleResult::dv}}) {
        const double error = relative_error(got.*result, exact.*result);
        const double usual = relative_error(library.*result, exact.*result);
        std::printf("%s of %ld queries and %ld keys: off by %.2g, LibTorch's operator by %.2g\n", name,
                    static_cast<long>(n), static_cast<long>(m), error, usual);
        EXPECT_LE(error, kTimes * usual) << name << " of " << n << " queries and " << m << " keys";
      }
    }
  }
}

TEST(Lengths, ReferenceKernel) { expect_right(KernelKind::kReference, at::kFloat, 2, 1, 20); }

}  // namespace
}  // namespace annulus::lengths_test
