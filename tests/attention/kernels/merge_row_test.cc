// Runs the merging kernel for GPUs on the CPU, thread by thread, and compares it with merge_parts: which rows and
// elements each thread computes, and which it leaves alone. Also tests that sums are added in one order.
#include "attention/tiles/merge_row.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "attention/tiles/merge.h"
#include "common/error.h"
#include "tests/attention/kernels/merge_case.h"

namespace annulus::merge_row_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Runs all threads of a call, lane 0 of each warp last.
struct RunThreads {
  const MergeArguments& arguments;
  const int64_t most_blocks;  // fewer than the grid has make each warp compute several rows

  template <typename A, typename P, typename O, int kWidth>
  int64_t run() const {
    const MergeGrid grid = merge_grid(arguments);
    const int64_t blocks = std::min(grid.rows, most_blocks);
    int64_t threads = 0;
    for (int64_t batch = 0; batch < grid.batch; ++batch) {
      for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t head = 0; head < grid.heads; ++head) {
          for (int warp = 0; warp < kMergeWarps; ++warp) {
            for (int lane = kMergeLanes - 1; lane >= 0; --lane, ++threads) {
              MergeWork<A, P, O, kWidth>(arguments, {head, block, batch, blocks, warp, lane}).run();
            }
          }
        }
      }
    }
    return threads;
  }
};

void merge_by_threads(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                      const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index = {},
                      int64_t most_blocks = MergeGrid::kMost) {
  const MergeArguments arguments = merge_arguments(out, lse, before_out, before_lse, parts, index);
  with_merge_types<at::BFloat16, at::Half>(arguments, RunThreads{arguments, most_blocks});
}

using testing::Merged;
using testing::widened;

const std::vector<at::ScalarType> kTypes{at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};

at::TensorOptions accumulator(at::ScalarType type) {
  return at::TensorOptions().dtype(type == at::kDouble ? at::kDouble : at::kFloat);
}

// Every dtype, with sizes of heads that are and are not a multiple of four and of a warp, any number of parts, with and
// without what was held before, and in place.
TEST(MergeRow, EveryThreadTogetherEqualsTheCpusLoop) {
  for (const at::ScalarType type : kTypes) {
    for (const int64_t dim : {1, 6, 20, 128, 300}) {
      for (const bool sums : {false, true}) {
        for (const size_t count : {0, 1, 4, 8}) {
          const std::vector<MergePart> parts = testing::parts_of_some_rows(type, dim, sums, count);
          const auto options = accumulator(type);
          const at::Tensor before = at::randn({2, 60, 3, dim}, options).transpose(1, 2);
          const at::Tensor before_lse = at::randn({2, 3, 60}, options) * 9;
          before_lse.slice(2, 0, 60, 5).fill_(-kInfinity);
          for (const bool narrow : {false, true}) {
            for (const bool held : {false, true}) {
              for (const int64_t most_blocks : {int64_t{2}, MergeGrid::kMost}) {
                const at::Tensor held_out = held ? before : at::Tensor();
                const at::Tensor held_lse = held && !sums ? before_lse : at::Tensor();
                const auto unset = [&](const at::TensorOptions& of_out, const at::TensorOptions& of_lse) {
                  return Merged{at::full({2, 3, 60, dim}, NAN, of_out),
                                sums ? at::Tensor() : at::full({2, 3, 60}, NAN, of_lse)};
                };
                const auto of_out = narrow ? options.dtype(type) : options, fp64 = options.dtype(at::kDouble);
                const Merged got = unset(of_out, options), usual = unset(of_out, options), exact = unset(fp64, fp64);
                merge_by_threads(got.out, got.lse, held_out, held_lse, parts, {}, most_blocks);
                merge_parts(usual.out, usual.lse, held_out, held_lse, parts);
                merge_parts(exact.out, exact.lse, widened(held_out), widened(held_lse), widened(parts));
                std::vector<MergePart> all = parts;
                if (held) all.emplace_back(held_out, held_lse, 0);
                const std::string where = std::string(c10::toString(type)) + ", head size " + std::to_string(dim) +
                                          ", parts " + std::to_string(count) + (sums ? ", sums" : "") +
                                          (narrow ? ", narrow" : "") + (held ? ", held" : "");
                EXPECT_TRUE(as_exact(got, usual, exact, all)) << where;
              }
            }
          }
        }
      }
    }
  }
}

// Rows that an index names are merged in place, and others are not touched. The views have strides and offsets.
TEST(MergeRow, IndexedRowsEqualTheCpusLoop) {
  for (const at::ScalarType type : kTypes) {
    for (const int64_t dim : {3, 8, 128}) {
      for (const bool sums : {false, true}) {
        const auto options = accumulator(type);
        const at::Tensor part = at::randn({2, 70, 3, dim}, options).to(type).transpose(1, 2);
        at::Tensor part_lse = at::randn({2, 3, 70}, options) * 9;
        part_lse.slice(2, 0, 70, 7).fill_(-kInfinity);
        const at::Tensor whole = at::randn({2, 110, 4, dim}, options), whole_lse = at::randn({2, 110, 4}, options) * 9;
        whole_lse.slice(1, 0, 110, 5).fill_(-kInfinity);
        const at::Tensor rows = at::randperm(100, at::kLong).narrow(0, 0, 70).contiguous();
        const MergePart one(part, sums ? at::Tensor() : part_lse, 0);
        const auto run = [&](bool by_threads, const at::Tensor& into, const at::Tensor& into_lse, const MergePart& p) {
          const Merged all{into.clone(), into_lse.clone()};
          const at::Tensor out = all.out.narrow(1, 5, 100).narrow(2, 1, 3).transpose(1, 2);
          const at::Tensor lse = sums ? at::Tensor() : all.lse.narrow(1, 5, 100).narrow(2, 1, 3).transpose(1, 2);
          by_threads ? merge_by_threads(out, lse, out, lse, {&p, 1}, rows, 3)
                     : merge_parts(out, lse, out, lse, {&p, 1}, rows);
          return all;
        };
        const Merged usual = run(false, whole, whole_lse, one), got = run(true, whole, whole_lse, one);
        const Merged exact = run(false, widened(whole), widened(whole_lse), testing::widened({one})[0]);
        EXPECT_TRUE(as_exact(got, usual, exact, {one, MergePart(whole, whole_lse, 0)}))
            << c10::toString(type) << " " << dim << sums;
        const at::Tensor outside = got.out.narrow(1, 0, 5);
        EXPECT_TRUE(outside.equal(whole.narrow(1, 0, 5)));
      }
    }
  }
}

// Sums have no weights, so they show the order of addition: part after part, and then what was held before. Values are
// chosen so that any other order rounds differently somewhere.
TEST(MergeRow, EightPartsAreAddedInTheirOrder) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const auto options = at::TensorOptions().dtype(type);
    std::vector<MergePart> parts;
    at::Tensor want = at::zeros({1, 2, 40, 64}, options);
    for (int p = 0; p < 8; ++p) {
      const at::Tensor values = at::randn({1, 2, 40, 64}, options) * std::pow(3.0, p);
      parts.push_back({values, {}, 0});
      want = want + values;
    }
    const at::Tensor held = at::randn({1, 2, 40, 64}, options);
    want = want + held;
    const at::Tensor by_loop = at::empty_like(held), by_threads = at::empty_like(held);
    merge_parts(by_loop, {}, held, {}, parts);
    merge_by_threads(by_threads, {}, held, {}, parts);
    EXPECT_TRUE(by_loop.equal(want)) << type;
    EXPECT_TRUE(by_threads.equal(want)) << type;
    std::swap(parts[0], parts[7]);
    merge_by_threads(by_threads, {}, held, {}, parts);
    EXPECT_FALSE(by_threads.equal(want)) << type;
  }
}

// A log-sum-exp that is not a number reaches the result. It is not taken for "no key", and makes no thread read the
// parts that are not there.
TEST(MergeRow, KeepsANaN) {
  const at::Tensor out = at::zeros({1, 1, 1, 4}), lse = at::zeros({1, 1, 1});
  const MergePart part(at::zeros({1, 1, 1, 4}), at::full({1, 1, 1}, NAN), 0);
  merge_by_threads(out, lse, out, lse, {&part, 1});
  EXPECT_TRUE(lse.isnan().all().item<bool>());
  EXPECT_TRUE(out.isnan().all().item<bool>());
}

TEST(MergeRow, GridCoversTheRowsWithinADevicesLimits) {
  MergeArguments a;
  a.batch = 3, a.heads = 5, a.rows = 9, a.dim = 8;
  const MergeGrid grid = merge_grid(a);
  EXPECT_EQ(grid.heads, 5);
  EXPECT_EQ(grid.rows, 3);  // four rows a block
  EXPECT_EQ(grid.batch, 3);
  EXPECT_TRUE(grid.fits());
  a.rows = int64_t{1} << 40;
  EXPECT_EQ(merge_grid(a).rows, 65535);
  a.batch = 65536;
  EXPECT_FALSE(merge_grid(a).fits());
  a.dim = 0;
  EXPECT_TRUE(merge_grid(a).empty());
}

TEST(MergeRow, FoursAreMovedOnlyWhereAllAddressesAllow) {
  const auto aligned = [](const at::Tensor& out, const at::Tensor& part) {
    const MergePart one(part, {}, 0);
    return merge_arguments(out, {}, {}, {}, {&one, 1}, {}).aligned;
  };
  const at::Tensor out = at::zeros({1, 2, 6, 8}), part = at::zeros({1, 2, 6, 8});
  EXPECT_TRUE(aligned(out, part));
  EXPECT_FALSE(aligned(out.narrow(3, 0, 6), part.narrow(3, 0, 6)));     // 6 elements
  EXPECT_FALSE(aligned(out, at::zeros({1, 2, 6, 9}).narrow(3, 0, 8)));  // rows of 9
  EXPECT_FALSE(aligned(out.narrow(3, 1, 4), part.narrow(3, 0, 4)));     // begins at element 1
  EXPECT_TRUE(aligned(out, at::zeros({1, 6, 2, 8}, at::kBFloat16).transpose(1, 2)));
}

TEST(MergeRow, RefusesTooManyPartsAndOtherDtypes) {
  const std::vector<MergePart> parts(kMostParts + 1, MergePart(at::zeros({1, 1, 1, 4}), {}, 0));
  EXPECT_THROW(merge_parts(at::zeros({1, 1, 1, 4}), {}, {}, {}, parts), Error);
  EXPECT_THROW(merge_arguments(at::zeros({1, 1, 1, 4}, at::kBFloat16), {}, {}, {}, std::span(parts).first(1), {}),
               Error);
}

}  // namespace
}  // namespace annulus::merge_row_test
