// Tests of comm/testing/ranks_test.h between processes: mpi_test runs it and expects exit code 1, because the first
// test fails on purpose.
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "comm/testing/ranks_test.h"

namespace annulus {
namespace {

// The others wait for the rank that has failed, and their waits end at the deadline of a test.
ANNULUS_RANKS_TEST(A, RankFails, 3) {
  ASSERT_NE(comm.rank(), 1) << "on purpose";
  comm.barrier({"end", 0});
}

ANNULUS_RANKS_TEST(B, TheTestHasFailedOnAllRanks, 2, 3, 4) {
  at::Tensor failed = at::full({1}, ::testing::UnitTest::GetInstance()->failed_test_count(), at::kLong);
  comm.all_reduce(failed, ReduceOp::kSum, {"failed tests", 0});
  EXPECT_EQ(failed.item<int64_t>(), comm.size());
  if (comm.rank() == 0) std::printf("%d ranks go on\n", comm.size());
}

ANNULUS_RANKS_TEST(C, NeedsMoreRanks, 4, 8) { FAIL() << "runs on " << comm.size(); }

}  // namespace
}  // namespace annulus
