// Tests comm/testing: orders of events, tests on ranks that agree on failure, and plans of faults.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "comm/testing/fault_plan.h"
#include "comm/testing/faults.h"
#include "comm/testing/orders.h"
#include "comm/testing/ranks_test.h"
#include "comm/testing/simulated_hosts.h"
#include "comm/threads/threads.h"
#include "common/error.h"

namespace annulus::testing_test {
namespace {

using annulus::testing::FailingOrder;
using annulus::testing::Fault;
using annulus::testing::FaultPlan;
using annulus::testing::find_failing_order;
using annulus::testing::Order;
using annulus::testing::OrderedRun;

at::Tensor numbers(double value) { return at::full({2}, value, at::kDouble); }

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// Rank 0 takes a message of each other rank, and remembers who came first.
int first_of(int ranks, RankOrder& order) {
  int first = -1;
  run_ranks(
      ranks,
      [&](Communicator& comm) {
        if (comm.rank() > 0) return comm.exchange({{numbers(comm.rank()), 0}}, {}, {"to rank 0", 0})->wait();
        std::vector<at::Tensor> in;
        std::vector<std::unique_ptr<Work>> works;
        for (int r = 1; r < comm.size(); ++r) {
          works.push_back(comm.exchange({}, {{in.emplace_back(numbers(0)), r}}, {"from all", r}));
        }
        while (first < 0) {
          for (int r = 1; r < comm.size() && first < 0; ++r) {
            if (works[static_cast<size_t>(r - 1)]->test()) first = r;
          }
        }
      },
      at::kCPU, &order);
  return first;
}

TEST(Orders, TextIsReadBack) {
  for (const char* text : {"none", "0>3", "5>0 9>2"}) EXPECT_EQ(Order::parse(text).text(), text);
  for (const char* text : {"5", "5>", "9>2 5>0", "5>0,9>2", "-1>0", "5>x"}) {
    EXPECT_NE(error_of([&] { Order::parse(text); }).find("expected EVENT>RANK"), std::string::npos) << text;
  }
}

TEST(Orders, ADrawnOrderIsRepeatedByItsSwitches) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    OrderedRun drawn(seed, 0.5);
    const int first = first_of(4, drawn);
    OrderedRun again(drawn.order());
    EXPECT_EQ(first_of(4, again), first) << drawn.order().text();
    EXPECT_EQ(again.events(), drawn.events());
  }
}

TEST(Orders, OneOfManySwitchesIsLeft) {
  const auto found = find_failing_order([](RankOrder& order) {
    const int first = first_of(4, order);
    return first == 3 ? "rank 3 was first" : std::string();
  });
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->failure, "rank 3 was first");
  EXPECT_EQ(found->order.switches.size(), 1U) << found->events;
  EXPECT_TRUE(found->repeatable);
  EXPECT_NE(found->events.find("rank 3 goes on"), std::string::npos) << found->events;
}

TEST(Orders, WhatPassesInEveryOrderIsNotReported) {
  int runs = 0;
  const auto attempt = [&](RankOrder& order) {
    ++runs;
    run_ranks(
        3,
        [](Communicator& comm) {
          at::Tensor x = numbers(comm.rank());
          comm.all_reduce(x, ReduceOp::kSum, {"sum", 0});
          comm.begin_all_reduce(x, ReduceOp::kSum, {"sum", 1})->wait();
          const auto part = comm.split(comm.rank() % 2, 0);
          part->barrier({"end", 0});
          if (x[1].item<double>() != 9) throw std::logic_error("a wrong sum");
        },
        at::kCPU, &order);
    return std::string();
  };
  EXPECT_FALSE(find_failing_order(attempt, {.orders = 40, .seed = 3}).has_value());
  EXPECT_EQ(runs, 40);
}

TEST(Orders, SaysWhenTheOrderDoesNotDecide) {
  int runs = 0;
  const auto found = find_failing_order([&](RankOrder& order) {
    first_of(3, order);
    return ++runs == 4 ? "now and then" : std::string();
  });
  ASSERT_TRUE(found.has_value());
  EXPECT_FALSE(found->repeatable);
  EXPECT_EQ(found->tried, 4);
}

// A deadline of a day passes when nobody can go on, and the error says who waits for whom.
TEST(Orders, AWaitThatNobodyCanEndSaysWhoWaitsForWhom) {
  for (const bool ordered : {false, true}) {
    OrderedRun order{Order()};
    const std::string error = error_of([&] {
      run_ranks(
          3,
          [](Communicator& comm) {
            comm.set_timeout(Seconds(comm.rank() == 1 ? 900 : 86400));
            at::Tensor in = numbers(0);
            if (comm.rank() == 2) comm.barrier({"end", 0});
            comm.exchange({}, {{in, (comm.rank() + 1) % 3}}, {"ring", 3, "hop"})->wait();
          },
          at::kCPU, ordered ? &order : nullptr);
    });
    EXPECT_EQ(error,
              "[comm] ring, hop 3: receiving 16 bytes from rank 2: not done within 900 s (given up at once: every rank "
              "waits: rank 0 in ring, hop 3: receiving 16 bytes from rank 1; rank 1 in ring, hop 3: receiving 16 bytes "
              "from rank 2; rank 2 in end: waiting for ranks 0-1)");
  }
}

TEST(RanksTest, NamesTheRankOfEachFailure) {
  const auto one_fails = [](Communicator& comm) {
    EXPECT_NE(comm.rank(), 1) << "on purpose";
    comm.barrier({"end", 0});
  };
  EXPECT_NONFATAL_FAILURE(testing::on_ranks({1, 3}, one_fails), "rank 1 of 3: ");
}

TEST(RanksTest, ANumberOfRanksThatIsSkippedLeavesTheOthers) {
  std::atomic<int> ran = 0;
  const auto skips_alone = [&](Communicator& comm) {
    if (comm.size() == 1) GTEST_SKIP() << "needs two ranks";
    ++ran;
  };
  testing::on_ranks({1, 2}, skips_alone);
  EXPECT_EQ(ran, 2);
  EXPECT_FALSE(::testing::Test::IsSkipped());
  testing::in_orders({1, 2}, /*orders=*/1, skips_alone);
  EXPECT_EQ(ran, 4);
}

TEST(RanksTest, AnAssertOfOneRankEndsTheWaitsOfTheOthers) {
  int woken = 0;
  const auto one_fails = [&](Communicator& comm) {
    comm.set_timeout(Seconds(86400));
    ASSERT_NE(comm.rank(), 2) << "on purpose";
    const std::string error = error_of([&] { comm.barrier({"end", 0}); });
    if (comm.rank() == 0 && error.find("rank 2 failed: ") != std::string::npos) ++woken;
  };
  EXPECT_NONFATAL_FAILURE(testing::on_ranks({3}, one_fails), "on purpose");
  EXPECT_EQ(woken, 1);
  const auto one_throws = [](Communicator& comm) {
    if (comm.rank() == 1) throw std::runtime_error("no row 17");
    comm.barrier({"end", 0});
  };
  EXPECT_NONFATAL_FAILURE(testing::on_ranks({2}, one_throws), "rank 1 of 2: no row 17");
}

TEST(RanksTest, AFailingOrderIsReportedWithHowToRepeatIt) {
  const auto first_wins = [](Communicator& comm) {
    if (comm.rank() > 0) return comm.exchange({{numbers(comm.rank()), 0}}, {}, {"to rank 0", 0})->wait();
    at::Tensor a = numbers(0), b = numbers(0);
    const auto from_1 = comm.exchange({}, {{a, 1}}, {"from", 1}), from_2 = comm.exchange({}, {{b, 2}}, {"from", 2});
    while (!from_1->test()) {
      if (from_2->test()) return ADD_FAILURE() << "rank 2 was first", void();
    }
  };
  EXPECT_NONFATAL_FAILURE(testing::in_orders({3}, 100, first_wins), "Repeat it with ANNULUS_TEST_ORDER='");
}

ANNULUS_RANKS_TEST(RanksTest, RunsOnAllTheseNumbersOfRanks, 1, 2, 5) {
  at::Tensor one = numbers(1);
  comm.all_reduce(one, ReduceOp::kSum, {"ranks", 0});
  EXPECT_EQ(one[0].item<double>(), comm.size());
}

TEST(SimulatedHosts, AreMissedByName) {
  EXPECT_FALSE(testing::on_simulated_host());
  EXPECT_NE(error_of([] { testing::cut_host("host2"); }).find("cut host2: expected simulated hosts"),
            std::string::npos);
}

TEST(FaultPlans, TextIsReadBack) {
  const std::string text = "kill:rank=1,nth=3; delay:rank=0,nth=5,seconds=0.2; drop:rank=2,nth=1";
  EXPECT_EQ(FaultPlan::parse(text, 3).text(), text);
  const FaultPlan drawn = FaultPlan::parse("seed=7,within=20,faults=3", 4);
  EXPECT_EQ(drawn.faults.size(), 3U);
  EXPECT_EQ(drawn.text(), FaultPlan::drawn(7, 4, 20, 3).text());
  EXPECT_NE(drawn.text(), FaultPlan::drawn(8, 4, 20, 3).text());
  EXPECT_EQ(FaultPlan::parse(drawn.text(), 4).text(), drawn.text());
  for (const auto& [bad, why] :
       std::vector<std::pair<std::string, std::string>>{{"explode:rank=1", "the kinds are delay"},
                                                        {"kill:rank=3", "there is no rank 3 among 3"},
                                                        {"kill:nth=1", "a fault needs a rank"},
                                                        {"kill:rank=1,nth=0", "nth is 0, not a whole number from 1 on"},
                                                        {"kill:rank=1,seconds=2", "\"seconds\" means nothing here"},
                                                        {"within=5", "neither a kind nor a seed"},
                                                        {"kill:rank=x", "rank is \"x\", not a number"}}) {
    EXPECT_NE(error_of([&] { FaultPlan::parse(bad, 3); }).find(why), std::string::npos) << bad;
  }
}

// Each of three ranks sends ten messages to the next. Returns what rank 0 received.
std::vector<double> received(const std::string& plan, std::string& error) {
  std::vector<double> values;
  error = error_of([&] {
    run_ranks(3, [&](Communicator& own) {
      own.set_timeout(Seconds(86400));
      const auto comm = testing::with_faults(own, FaultPlan::parse(plan, own.size()));
      for (int step = 0; step < 10; ++step) {
        at::Tensor in = numbers(-1), out = numbers(step);
        comm->exchange({{out, (own.rank() + 1) % 3}}, {{in, (own.rank() + 2) % 3}}, {"ring", step, "hop"})->wait();
        if (own.rank() == 0) values.push_back(in[1].item<double>());
      }
    });
  });
  return values;
}

TEST(Faults, MessagesAreDoubledAndOvertaken) {
  std::string error;
  EXPECT_EQ(received("", error), (std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(received("duplicate:rank=2,nth=4; delay:rank=1,nth=2,seconds=0.001", error),
            (std::vector<double>{0, 1, 2, 3, 3, 4, 5, 6, 7, 8}));
  EXPECT_NE(error.find("sending 16 bytes to rank 0: that rank returned"), std::string::npos) << error;  // the last one
  EXPECT_EQ(received("reorder:rank=2,nth=4", error), (std::vector<double>{0, 1, 2, 4, 3, 5, 6, 7, 8, 9}));
  EXPECT_EQ(received("reorder:rank=2,nth=4; reorder:rank=2,nth=5", error),
            (std::vector<double>{0, 1, 2, 5, 3, 4, 6, 7, 8, 9}));
  EXPECT_EQ(error, "");
}

TEST(Faults, ALostMessageIsAWaitThatNobodyCanEnd) {
  std::string error;
  EXPECT_EQ(received("drop:rank=2,nth=4", error), (std::vector<double>{0, 1, 2, 4, 5, 6, 7, 8, 9}));
  EXPECT_NE(error.find("from rank 2: that rank returned without taking part"), std::string::npos) << error;
}

TEST(Faults, AKilledRankIsNamedAndAStoppedOneIsWaitedFor) {
  std::string error;
  received("kill:rank=1,nth=3", error);
  EXPECT_EQ(error, "rank 1 was killed by the plan of faults before ring, hop 2");
  received("stop:rank=1,nth=3", error);
  EXPECT_NE(error.find("every rank waits: "), std::string::npos) << error;
  EXPECT_NE(error.find("rank 1 in ring, hop 2: receiving 4 bytes from rank 1"), std::string::npos) << error;
  EXPECT_EQ(error.find("not done within 31536000 s"), std::string::npos) << error;
}

}  // namespace
}  // namespace annulus::testing_test
