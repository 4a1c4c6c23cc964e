// The shared suite: exchanges of messages.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <iterator>
#include <memory>
#include <random>
#include <utility>

#include "tests/comm/suite_fixture.h"

namespace annulus::comm_test {
namespace {

TEST_P(CommSuite, ReportsSizeRankAndBackend) {
  ranks([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), GetParam());
    EXPECT_GE(comm.rank(), 0);
    EXPECT_LT(comm.rank(), comm.size());
    EXPECT_EQ(comm.backend(), backend().name);
    EXPECT_EQ(comm.host().rank(), comm.rank());
    EXPECT_EQ(comm.host().size(), comm.size());
  });
}

TEST_P(CommSuite, RingOfEveryDtype) {
  ranks([&](Communicator& comm) {
    const int size = comm.size();
    for (const at::ScalarType dtype : kDtypes) {
      at::Tensor held = pattern(1000, dtype, comm.rank());
      at::Tensor next = at::empty({1000}, options(dtype));
      for (int step = 0; step < size; ++step) {
        auto work = comm.exchange({{held, (comm.rank() + 1) % size}}, {{next, (comm.rank() + size - 1) % size}},
                                  {"ring", step});
        comm.progress();
        work->wait();
        while (!work->test()) sched_yield();  // on a GPU wait() does not block
        std::swap(held, next);
        const int owner = (comm.rank() - step - 1 + 2 * size) % size;
        EXPECT_TRUE(at::equal(held, pattern(1000, dtype, owner))) << dtype << " step " << step;
      }
    }
  });
}

TEST_P(CommSuite, GroupedExchangeMatchesInListOrder) {
  ranks([&](Communicator& comm) {
    const int size = comm.size();
    // Each rank sends three messages of different lengths, one of them empty, to every rank including itself.
    const int64_t lengths[] = {17, 0, 4001};
    std::vector<Message> sends;
    std::vector<Message> receives;
    for (int i = 0; i < 3; ++i) {
      for (int peer = 0; peer < size; ++peer) {
        sends.push_back({pattern(lengths[i] + peer, at::kFloat, comm.rank() * 10 + i), peer});
        receives.push_back({at::empty({lengths[i] + comm.rank()}, options(at::kFloat)), peer});
      }
    }
    comm.exchange(sends, receives, {"all to all", 0})->wait();
    for (int i = 0; i < 3; ++i) {
      for (int peer = 0; peer < size; ++peer) {
        EXPECT_TRUE(at::equal(receives[static_cast<size_t>(i * size + peer)].tensor,
                              pattern(lengths[i] + comm.rank(), at::kFloat, peer * 10 + i)));
      }
    }
  });
}

TEST_P(CommSuite, RandomExchangesOutstandingTogether) {
  ranks([&](Communicator& comm) {
    std::mt19937 random(7);  // the same on every rank: both ends draw the same messages
    for (int round = 0; round < 10; ++round) {
      std::vector<std::unique_ptr<Work>> works;
      std::vector<std::pair<at::Tensor, at::Tensor>> received;  // (received, expected)
      const int exchanges = 1 + static_cast<int>(random() % 3);
      for (int e = 0; e < exchanges; ++e) {
        std::vector<Message> sends;
        std::vector<Message> receives;
        const int messages = static_cast<int>(random() % 6);
        for (int m = 0; m < messages; ++m) {
          const int from = static_cast<int>(random()) & 0xffff;
          const int to = static_cast<int>(random()) & 0xffff;
          const int64_t length = static_cast<int64_t>(random() % 3 == 0 ? random() % 100000 : random() % 10);
          const at::ScalarType dtype = kDtypes[random() % std::size(kDtypes)];
          const int seed = static_cast<int>(random() % 1000);
          if (from % comm.size() == comm.rank()) sends.push_back({pattern(length, dtype, seed), to % comm.size()});
          if (to % comm.size() == comm.rank()) {
            receives.push_back({at::empty({length}, options(dtype)), from % comm.size()});
            received.emplace_back(receives.back().tensor, pattern(length, dtype, seed));
          }
        }
        works.push_back(comm.exchange(sends, receives, {"random", round}));
      }
      for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
      for (const auto& [came, expected] : received) EXPECT_TRUE(at::equal(came, expected)) << "round " << round;
    }
  });
}

TEST_P(CommSuite, TestCompletesWithoutWait) {
  ranks([&](Communicator& comm) {
    at::Tensor out = pattern(200000, at::kFloat, comm.rank());
    at::Tensor in = at::empty({200000}, options(at::kFloat));
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    auto work = comm.exchange({{out, next}}, {{in, previous}}, {"test", 0});
    while (!work->test()) comm.progress();
    work->wait();  // already complete
    EXPECT_TRUE(at::equal(in, pattern(200000, at::kFloat, previous)));
  });
}

TEST_P(CommSuite, WorkWaitsWhenDestroyed) {
  ranks([&](Communicator& comm) {
    at::Tensor in = at::empty({70000}, options(at::kLong));
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    comm.exchange({{pattern(70000, at::kLong, comm.rank()), (comm.rank() + 1) % comm.size()}}, {{in, previous}},
                  {"dropped", 0});
    EXPECT_TRUE(at::equal(in, pattern(70000, at::kLong, previous)));
  });
}

TEST_P(CommSuite, EmptyExchangesComplete) {
  ranks([&](Communicator& comm) {
    EXPECT_TRUE(comm.exchange({}, {}, {"nothing", 0})->test());
    at::Tensor none = at::empty({0, 3}, options(at::kFloat));
    at::Tensor none2 = at::empty({0, 3}, options(at::kFloat));
    comm.exchange({{none, (comm.rank() + 1) % comm.size()}}, {{none2, (comm.rank() + comm.size() - 1) % comm.size()}},
                  {"nothing", 1})
        ->wait();
    comm.all_reduce(none, ReduceOp::kSum, {"nothing", 2});
    comm.broadcast(none, comm.size() - 1, {"nothing", 3});
    at::Tensor all = at::empty({comm.size(), 0, 3}, options(at::kFloat));
    comm.all_gather(all, none, {"nothing", 4});
    comm.reduce_scatter(none, all, {"nothing", 5});
    EXPECT_EQ(comm.stats().messages_sent, 0);
    EXPECT_EQ(comm.stats().bytes_sent, 0);
    EXPECT_EQ(comm.stats().messages_received, 0);
    EXPECT_EQ(comm.stats().bytes_received, 0);
    EXPECT_EQ(comm.stats().collectives, 4);
    EXPECT_EQ(comm.stats().collective_payload, 0);
  });
}

TEST_P(CommSuite, CountsMessagesAndBytes) {
  ranks([&](Communicator& comm) {
    const CommStats before = comm.stats();
    at::Tensor in = at::empty({30}, options(at::kDouble));
    at::Tensor none = at::empty({0}, options(at::kDouble));
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (int step = 0; step < 5; ++step) {
      comm.exchange({{pattern(30, at::kDouble, step), next}, {none, next}}, {{in, previous}, {none, previous}},
                    {"count", step})
          ->wait();
    }
    EXPECT_EQ(comm.stats().messages_sent - before.messages_sent, 5);
    EXPECT_EQ(comm.stats().messages_received - before.messages_received, 5);
    EXPECT_EQ(comm.stats().bytes_sent - before.bytes_sent, 5 * 30 * 8);
    EXPECT_EQ(comm.stats().bytes_received - before.bytes_received, 5 * 30 * 8);
    EXPECT_GE(comm.stats().wait_seconds, 0);
  });
}

TEST_P(CommSuite, LargeMessages) {
  ranks([&](Communicator& comm) {
    constexpr int64_t kLength = 3'000'001;
    at::Tensor in = at::empty({kLength}, options(at::kFloat));
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    comm.exchange({{pattern(kLength, at::kFloat, comm.rank()), (comm.rank() + 1) % comm.size()}}, {{in, previous}},
                  {"large", 0})
        ->wait();
    EXPECT_TRUE(at::equal(in, pattern(kLength, at::kFloat, previous)));
  });
}

}  // namespace
}  // namespace annulus::comm_test
