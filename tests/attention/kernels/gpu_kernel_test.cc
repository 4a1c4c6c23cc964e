// Compares the kernels for GPUs with the definitions: every operator at every length, head size and window, scattered
// tiles, and merging. Tests of a library's operator print and assert which operators really computed. The file is also
// built without CUDA, and is skipped, with the reason, without a GPU that the build can use.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernels/composed_kernel.h"
#include "attention/kernels/detect.h"
#include "attention/kernels/library_operators.h"
#include "attention/kernels/operator_list.h"
#include "attention/tiles/merge.h"
#include "common/error.h"
#include "memory/upload.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/attention/kernels/lengths.h"
#include "tests/attention/kernels/merge_case.h"
#include "tests/attention/kernels/operator_calls.h"

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using testing::OperatorCalls;
using testing::text_of;

class GpuKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (gpu_abilities().name.empty()) GTEST_SKIP() << "no GPU that this build can use";
    // In a run, cuDNN prepares a limited number of shapes. Here each shape of every test is to be computed by cuDNN.
    OperatorHistory::of_process().set_most_prepared(int64_t{1} << 30);
  }
  void TearDown() override {
    OperatorHistory::of_process().set_most_prepared(OperatorHistory::kMostPrepared);
    if (ran_.empty()) return;
    std::printf("operators: %s\n", text_of(ran_).c_str());
    RecordProperty("operators", text_of(ran_));
    for (const std::string& refusal : OperatorHistory::of_process().refusals()) {
      std::printf("refused so far: %s\n", refusal.c_str());
    }
  }

  // Runs run() and returns the calls of each operator. TearDown prints the sum of a test.
  template <typename Run>
  OperatorCalls operators_of(const Run& run) {
    const OperatorCalls calls = testing::calls_during(run);
    for (const auto& [name, n] : calls) ran_[name] += n;
    return calls;
  }

  // Expects that all calls were computed by the kernel's own operator or, if `others` may, that some were.
  static void expect_own(KernelKind kind, const OperatorCalls& calls, bool others, const std::string& what) {
    const std::string own(to_string(kind));
    EXPECT_EQ(calls.count(own), 1u) << what << ": computed by " << text_of(calls) << " instead of " << own;
    if (!others) {
      EXPECT_EQ(calls.size(), 1u) << what << ": computed by " << text_of(calls) << ", not by " << own << " alone";
    }
  }

  static double unit(KernelKind kind, at::ScalarType type) { return testing::unit_of(kind, at::kCUDA, type); }

  // Returns why this operator is not available here; empty if it is.
  static std::string obstacle(KernelKind kind, at::ScalarType type, int64_t dim) {
    try {
      choose_kernel(kind, at::kCUDA, type, dim, false);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  void expect_right(KernelKind asked, at::ScalarType type, int64_t heads, int64_t kv_heads, int64_t dim) {
    const std::string why_not = obstacle(asked, type, dim);
    if (!why_not.empty()) GTEST_SKIP() << why_not;
    const KernelKind kind = choose_kernel(asked, at::kCUDA, type, dim, false).kind;
    for (const testing::LengthCase& c : testing::length_cases(heads, kv_heads, dim, 4096)) {
      const OperatorCalls calls = operators_of([&] {
        try {
          EXPECT_EQ(testing::check_length(c, kind, at::kCUDA, type), "") << to_string(kind);
        } catch (const c10::AcceleratorError&) {  // the device computes nothing any more
          throw;
        } catch (const std::exception& error) {  // the other lengths are to be tested nevertheless
          ADD_FAILURE() << to_string(kind) << ", " << c.text() << ": " << error.what();
        }
      });
      const bool windowed = c.pattern.find("window") != std::string::npos;
      const bool sees_nothing = !windowed && c.query_offset + c.queries <= 0;
      const bool square = !windowed && c.queries == c.keys && c.queries > 1 && c.query_offset == 0;
      if (kind == KernelKind::kReference || sees_nothing) {
        EXPECT_TRUE(calls.empty()) << c.text() << ": computed by " << text_of(calls);
      } else if (kind != KernelKind::kCudnn || square) {  // cuDNN's operator takes no windows and no single rows
        // Nor does it take the backward of full calls with 64 keys beyond a multiple of 128.
        const bool forward_only = c.pattern.find("full") != std::string::npos && c.keys % 128 == 64;
        expect_own(kind, calls, /*others=*/kind == KernelKind::kCudnn && forward_only, c.text());
      }
    }
  }

 private:
  OperatorCalls ran_;
};

struct Operator {
  KernelKind kind;
  at::ScalarType type;
  int64_t dim;
};

class GpuLengths : public GpuKernels, public ::testing::WithParamInterface<Operator> {};

TEST_P(GpuLengths, EqualTheDefinitions) { expect_right(GetParam().kind, GetParam().type, 64, 8, GetParam().dim); }

std::vector<Operator> operators() {
  std::vector<Operator> list;
  for (const KernelKind kind : {KernelKind::kCudnn, KernelKind::kFlash2, KernelKind::kFlash3, KernelKind::kEfficient}) {
    for (const int64_t dim : {64, 96, 128, 256}) list.push_back({kind, at::kBFloat16, dim});
    list.push_back({kind, at::kHalf, 128});
  }
  for (const int64_t dim : {20, 64, 128, 256}) list.push_back({KernelKind::kEfficient, at::kFloat, dim});
  list.push_back({KernelKind::kReference, at::kDouble, 64});
  return list;
}

INSTANTIATE_TEST_SUITE_P(All, GpuLengths, ::testing::ValuesIn(operators()), [](const auto& info) {
  return std::string(to_string(info.param.kind)) + "_" + c10::toString(info.param.type) + "_" +
         std::to_string(info.param.dim);
});

TEST_F(GpuKernels, MultiHeadAttentionEqualsTheDefinitions) {
  expect_right(KernelKind::kAuto, at::kBFloat16, 8, 8, 128);
  expect_right(KernelKind::kAuto, at::kFloat, 8, 8, 64);
}

// Tiles are gathered, strided and banded, of some batch rows and heads, large and small.
TEST_F(GpuKernels, ScatteredTilesEqualTheDefinitions) {
  for (const KernelKind kind : {KernelKind::kCudnn, KernelKind::kFlash2, KernelKind::kFlash3, KernelKind::kEfficient}) {
    for (const bool one_head : {false, true}) {
      for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
        if (!obstacle(kind, type, 64).empty()) {
          std::printf("left out: %s\n", obstacle(kind, type, 64).c_str());
          continue;
        }
        const testing::Case c = testing::moved(testing::scattered(at::kFloat, one_head, 64), at::kCPU, type);
        const testing::Case there = testing::moved(c, at::kCUDA, type);
        const OperatorCalls calls = operators_of([&] {
          EXPECT_TRUE(right(testing::run(there, kind), c, testing::by_definition(c), unit(kind, type)))
              << to_string(kind) << " " << one_head << " " << c10::toString(type);
        });
        // Here cuDNN's operator gets what is neither banded nor gathered.
        expect_own(kind, calls, /*others=*/kind == KernelKind::kCudnn, "scattered tiles");
      }
    }
  }
}

TEST_F(GpuKernels, DropoutEqualsThatOfTheCpu) {
  testing::Case c = testing::scattered(at::kFloat, false, 64);
  c.call.dropout = {0.3, 7, 3, 1, 5};
  const testing::Case there = testing::moved(c, at::kCUDA, at::kFloat);
  const KernelKind kind = choose_kernel(KernelKind::kAuto, at::kCUDA, at::kFloat, 64, /*dropout=*/true).kind;
  EXPECT_TRUE(right(testing::run(there, kind), c, testing::by_definition(c), unit(kind, at::kFloat)));
}

// The result does not depend on how `fill` and `most_gathered` divide the tiles.
TEST_F(GpuKernels, ResultIsIndependentOfGathering) {
  const testing::Case c = testing::scattered(at::kFloat, false, 64);
  const testing::Case there = testing::moved(c, at::kCUDA, at::kFloat);
  const testing::Expected want = testing::by_definition(c);
  for (const auto& [gathered, fill] : {std::pair<int64_t, int64_t>{1 << 20, 1 << 20}, {1, 1}, {300, 4}}) {
    ComposedKernelOptions options;
    options.limits.most_gathered = gathered, options.limits.fill = fill;
    const auto make = [&options = options] { return make_composed_kernel({efficient_operator()}, options); };
    EXPECT_TRUE(right(testing::run(there, make), c, want, unit(KernelKind::kEfficient, at::kFloat))) << gathered;
  }
}

TEST_F(GpuKernels, DeterministicRunsAreBitIdentical) {
  const struct Deterministic {
    Deterministic() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false); }
    ~Deterministic() { at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false); }
  } deterministic;
  for (const at::ScalarType type : {at::kBFloat16, at::kFloat}) {
    const testing::Case c = testing::moved(testing::scattered(at::kFloat, false, 64), at::kCUDA, type);
    const testing::Result a = testing::run(c, KernelKind::kAuto), b = testing::run(c, KernelKind::kAuto);
    EXPECT_TRUE(a.out.equal(b.out) && a.lse.equal(b.lse));
    EXPECT_TRUE(a.dq.equal(b.dq) && a.dk.equal(b.dk) && a.dv.equal(b.dv));
  }
}

// Compares the device's kernel with the CPU's loop: dtypes, strides, sizes that are not a multiple of four, indexed
// rows, and rows without keys on either side.
TEST_F(GpuKernels, MergeEqualsThatOfTheCpu) {
  for (const int64_t dim : {3, 8, 20, 128, 256}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      for (const bool indexed : {false, true}) {
        const auto acc = at::TensorOptions().dtype(type == at::kDouble ? at::kDouble : at::kFloat);
        const auto part_out = at::randn({2, 70, 3, dim}, acc).to(type).transpose(1, 2);
        at::Tensor part_lse = at::randn({2, 3, 70}, acc) * 40;
        at::Tensor out = at::randn({2, 100, 3, dim}, acc).transpose(1, 2), lse = at::randn({2, 3, 100}, acc) * 40;
        part_lse.slice(2, 0, 70, 7).fill_(-kInfinity);
        lse.slice(2, 0, 100, 5).fill_(-kInfinity);
        const at::Tensor rows = indexed ? at::randperm(100, at::kLong).narrow(0, 0, 70).contiguous() : at::Tensor();
        if (!indexed) out = out.narrow(2, 30, 70), lse = lse.narrow(2, 30, 70);
        const auto there = [](const at::Tensor& t) { return t.defined() ? t.to(at::kCUDA) : t; };
        const testing::Merged got{there(out), there(lse)}, usual{out.clone(), lse.clone()};
        const testing::Merged exact{out.to(at::kDouble, false, /*copy=*/true), lse.to(at::kDouble, false, true)};
        merge_partial(got.out, got.lse, there(part_out), there(part_lse), there(rows));
        merge_partial(usual.out, usual.lse, part_out, part_lse, rows);
        merge_partial(exact.out, exact.lse, testing::widened(part_out), testing::widened(part_lse), rows);
        EXPECT_TRUE(as_exact(got, usual, exact, {MergePart(part_out, part_lse, 0), MergePart(out, lse, 0)}))
            << dim << " " << c10::toString(type);
      }
    }
  }
}

// Eight parts, each of some rows, heads and batch rows, are merged in one pass, also into bf16. merge_row_test.cc runs
// the same code on the CPU.
TEST_F(GpuKernels, MergeOfSeveralPartsEqualsThatOfTheCpu) {
  for (const int64_t dim : {6, 128}) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      for (const bool sums : {false, true}) {
        const auto acc = at::TensorOptions().dtype(type == at::kDouble ? at::kDouble : at::kFloat);
        const std::vector<MergePart> parts = testing::parts_of_some_rows(type, dim, sums, kMostParts);
        std::vector<MergePart> there = parts;
        for (MergePart& part : there) {
          part.out = part.out.to(at::kCUDA);
          if (!sums) part.lse = part.lse.to(at::kCUDA);
        }
        for (const bool narrow : {false, true}) {
          for (const bool held : {false, true}) {
            const at::Tensor before = at::randn({2, 3, 60, dim}, acc), before_lse = at::randn({2, 3, 60}, acc);
            const at::Tensor held_lse = held && !sums ? before_lse : at::Tensor();
            const auto run = [&](const std::vector<MergePart>& list, at::Device device, at::ScalarType of_out,
                                 at::ScalarType of_lse) {
              const auto moved = [&](const at::Tensor& t) { return t.defined() ? t.to(device, of_lse) : t; };
              const testing::Merged to{at::empty({2, 3, 60, dim}, acc.device(device).dtype(of_out)),
                                       sums ? at::Tensor() : at::empty({2, 3, 60}, acc.device(device).dtype(of_lse))};
              merge_parts(to.out, to.lse, held ? moved(before) : at::Tensor(), moved(held_lse), list);
              return to;
            };
            const at::ScalarType of_lse = acc.dtype().toScalarType(), of_out = narrow ? type : of_lse;
            const testing::Merged exact = run(testing::widened(parts), at::kCPU, at::kDouble, at::kDouble);
            std::vector<MergePart> all = parts;
            if (held) all.emplace_back(before, held_lse, 0);
            EXPECT_TRUE(
                as_exact(run(there, at::kCUDA, of_out, of_lse), run(parts, at::kCPU, of_out, of_lse), exact, all))
                << dim << c10::toString(type) << sums << held;
          }
        }
      }
    }
  }
}

TEST_F(GpuKernels, UploadIsNotAffectedByLaterWrites) {
  at::Tensor host = at::full({1 << 16}, 7, at::kLong);
  const at::Tensor there = upload(host, at::kCUDA);
  host.fill_(9);  // the copy was made from separate pinned memory
  EXPECT_TRUE(there.eq(7).all().item<bool>());
}

}  // namespace
}  // namespace annulus
