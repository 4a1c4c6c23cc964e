// Tests problem.h with ranks as threads of one process, without a launcher and without MPI.
#include <gtest/gtest.h>

#include "comm/threads/threads.h"
#include "problem.h"

TEST(Attention, IsTheDenseOneOnAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 4}) {
    annulus::run_ranks(ranks, [](annulus::Communicator& comm) { EXPECT_LT(largest_error(comm, 53), 1e-12); });
  }
}
