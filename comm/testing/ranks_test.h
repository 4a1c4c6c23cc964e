// Tests with GoogleTest that run on several ranks and agree on failure. Ranks are threads; in a program with the main
// function of processes_main.cc that mpirun has started, they are its processes.
//
//   ANNULUS_RANKS_TEST(Ring, SumsWhatAllRanksHave, 1, 2, 3) {      // on 1, on 2 and on 3 ranks
//     at::Tensor x = at::full({5}, comm.rank(), at::kDouble);
//     ring_all_reduce(comm, x);
//     EXPECT_EQ(x[4].item<double>(), comm.size() * (comm.size() - 1) / 2);
//   }
//
// Every failed EXPECT is reported with its rank. If a rank fails an ASSERT or throws, the waits of the other ranks end:
// at once between threads, at the deadline of a test (ANNULUS_TEST_DEADLINE, 20 s) between processes. Then the test
// fails on all of them. Failures in further threads that a body starts are reported without a rank.
#pragma once

#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "comm/communicator.h"

namespace annulus::testing {

using RankBody = std::function<void(Communicator&)>;

// Runs body on each of these numbers of ranks and reports failures to GoogleTest. Between processes, numbers above that
// of the processes are left out; if that leaves none, or the body skips all, the test is skipped.
void on_ranks(const std::vector<int>& sizes, const RankBody& body);

// Runs body in up to `orders` orders of events for each number of ranks (orders.h). A failure is reported with the
// order, after shrinking, and how to repeat it. Between processes this is on_ranks().
void in_orders(const std::vector<int>& sizes, int orders, const RankBody& body);

// Between processes: the communicator of all of them; null if ranks are threads. Set by processes_main.cc, for others
// before RUN_ALL_TESTS(). It must outlive the tests, and all processes must run the same ones.
void set_world(Communicator* world);

}  // namespace annulus::testing

#define ANNULUS_RANKS_BODY_(suite, name) suite##_##name##_on_a_rank

#define ANNULUS_RANKS_TEST(suite, name, ...)                                                           \
  static void ANNULUS_RANKS_BODY_(suite, name)(::annulus::Communicator & comm);                        \
  TEST(suite, name) { ::annulus::testing::on_ranks({__VA_ARGS__}, ANNULUS_RANKS_BODY_(suite, name)); } \
  static void ANNULUS_RANKS_BODY_(suite, name)([[maybe_unused]] ::annulus::Communicator & comm)

// The same in `orders` drawn orders of events.
#define ANNULUS_ORDERS_TEST(suite, name, orders, ...)                                                           \
  static void ANNULUS_RANKS_BODY_(suite, name)(::annulus::Communicator & comm);                                 \
  TEST(suite, name) { ::annulus::testing::in_orders({__VA_ARGS__}, orders, ANNULUS_RANKS_BODY_(suite, name)); } \
  static void ANNULUS_RANKS_BODY_(suite, name)([[maybe_unused]] ::annulus::Communicator & comm)
