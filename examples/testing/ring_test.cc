// Tests ring.h. As a program of one process its ranks are threads, under mpirun processes.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "annulus/testing/faults.h"
#include "annulus/testing/ranks_test.h"
#include "ring.h"

namespace {

using annulus::testing::FaultPlan;

// Whole numbers, whose sum is exact in any order.
at::Tensor numbers(int rank) {
  at::Tensor x = at::empty({5}, at::kDouble);
  for (int i = 0; i < 5; ++i) x[i] = (rank + 1) * (i + 1);
  return x;
}
at::Tensor sums(int size) { return numbers(0) * (size * (size + 1) / 2); }

}  // namespace

// 1. Every number of ranks: an odd number does not notice what goes wrong with an even one.
ANNULUS_RANKS_TEST(Ring, AddsUpAllRanks, 1, 2, 3, 4) {
  at::Tensor x = numbers(comm.rank());
  ring_all_reduce(comm, x);
  EXPECT_TRUE(x.equal(sums(comm.size()))) << x;
}

// 2. Every order of events: what is added depends on who comes first only if the code lets it.
ANNULUS_ORDERS_TEST(Ring, RoundsAlikeInEveryOrder, 50, 3) {
  const double of_rank[] = {1e16, 1, -1e16};
  at::Tensor x = at::full({1}, of_rank[comm.rank()], at::kDouble);
  ring_all_reduce(comm, x);
  EXPECT_EQ(x[0].item<double>(), 0) << "1e16 + 1 is 1e16, in the order of the ranks";
}

// 3. Faults: with a lost, doubled or overtaken message the sum may fail, but it must not be wrong.
ANNULUS_RANKS_TEST(Ring, IsNeverWrongWhenMessagesAre, 3, 4) {
  for (const char* plan : {"drop:rank=1,nth=1", "duplicate:rank=1,nth=1", "reorder:rank=1,nth=1"}) {
    const auto own = comm.split(0, comm.rank());
    own->set_timeout(annulus::Seconds(0.5));
    const auto faulty = annulus::testing::with_faults(*own, FaultPlan::parse(plan, comm.size()));
    at::Tensor x = numbers(comm.rank());
    try {
      ring_all_reduce(*faulty, x);
      EXPECT_TRUE(x.equal(sums(comm.size()))) << plan << ": " << x;
    } catch (const std::runtime_error&) {  // annulus::Error, or that of the ring
    }
  }
}
