// Tests of attention/execution/merge_over_ranks.h: queries that come to keys on several ranks.
#include "attention/execution/merge_over_ranks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "comm/threads/threads.h"
#include "tests/common/exactness.h"

namespace annulus::merge_over_ranks_test {
namespace {

constexpr int64_t kHeads = 3, kQueries = 2, kDim = 5;
constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Attention over some keys, from scores [1, H, n, keys] and values [1, H, keys, D].
PartialAttention attention_of(const at::Tensor& scores, const at::Tensor& values) {
  if (scores.size(3) == 0) {
    // What is in `out` must not matter.
    return {at::full({1, kQueries, kHeads, kDim}, std::numeric_limits<double>::quiet_NaN(), values.options()),
            at::full({1, kHeads, kQueries}, kNothing, values.options())};
  }
  const at::Tensor lse = at::logsumexp(scores, {3});
  return {at::matmul((scores - lse.unsqueeze(3)).exp(), values).transpose(1, 2).contiguous(), lse};
}

// Rank r has some keys, rank 1 and the last one have none. More than eight ranks are merged in several passes.
TEST(MergeOverRanks, IsTheAttentionOverAllKeys) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    for (const int ranks : {1, 2, 3, 8, 9, 17}) {
      const auto keys = [&](int rank) { return rank == 1 || (rank > 1 && rank == ranks - 1) ? 0 : rank % 3 + 1; };
      int64_t all = 0;
      std::vector<int64_t> begins;
      for (int rank = 0; rank < ranks; ++rank) {
        begins.push_back(all);
        all += keys(rank);
      }
      const at::TensorOptions options(type);
      // So far apart that the sum of their exponentials would overflow in fp32.
      const at::Tensor scores = at::randn({1, kHeads, kQueries, all}, options) * 40;
      const at::Tensor values = at::randn({1, kHeads, all, kDim}, options);
      const PartialAttention want = attention_of(scores.to(at::kDouble), values.to(at::kDouble));
      const PartialAttention plain = attention_of(scores, values);
      std::vector<PartialAttention> merged(static_cast<size_t>(ranks));
      run_ranks(ranks, [&](Communicator& comm) {
        const auto rank = static_cast<size_t>(comm.rank());
        merged[rank] = merge_over_ranks(comm,
                                        attention_of(scores.narrow(3, begins[rank], keys(comm.rank())),
                                                     values.narrow(2, begins[rank], keys(comm.rank()))),
                                        {"test"});
      });
      for (const PartialAttention& of_rank : merged) {
        EXPECT_TRUE(of_rank.out.equal(merged[0].out)) << ranks;
        EXPECT_TRUE(of_rank.lse.equal(merged[0].lse)) << ranks;
      }
      if (type == at::kDouble) {
        EXPECT_TRUE(testing::agrees(merged[0].out, want.out)) << ranks;
        EXPECT_TRUE(testing::agrees(merged[0].lse, want.lse)) << ranks;
      } else {
        EXPECT_TRUE(testing::as_exact_as(merged[0].out, plain.out, want.out)) << ranks;
        EXPECT_TRUE(testing::as_exact_as(merged[0].lse, plain.lse, want.lse)) << ranks;
      }
    }
  }
}

TEST(MergeOverRanks, QueriesWithoutKeysAnywhereGetZeros) {
  run_ranks(3, [&](Communicator& comm) {
    const at::TensorOptions options(at::kFloat);
    const PartialAttention merged = merge_over_ranks(
        comm, attention_of(at::empty({1, kHeads, kQueries, 0}, options), at::empty({1, kHeads, 0, kDim}, options)),
        {"test"});
    EXPECT_TRUE(merged.out.eq(0).all().item<bool>());
    EXPECT_TRUE(merged.lse.eq(kNothing).all().item<bool>());
  });
}

}  // namespace
}  // namespace annulus::merge_over_ranks_test
