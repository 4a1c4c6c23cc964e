// The contract of communicators: exchanges of messages, copied and lent.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "comm/link_probe.h"
#include "comm/testing/contract_fixture.h"
#include "memory/releasable.h"

namespace annulus::contract {
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
    for (const at::ScalarType dtype : kDtypes) {
      at::Tensor held = pattern(1000, dtype, comm.rank());
      at::Tensor next = at::empty({1000}, options(dtype));
      for (int step = 0; step < comm.size(); ++step) {
        auto work = comm.exchange({{held, next_of(comm)}}, {{next, previous_of(comm)}}, {"ring", step});
        comm.progress();
        finish(*work);
        std::swap(held, next);
        const int owner = (comm.rank() - step - 1 + 2 * comm.size()) % comm.size();
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
    auto work = comm.exchange({{out, next_of(comm)}}, {{in, previous_of(comm)}}, {"test", 0});
    while (!work->test()) comm.progress();
    work->wait();  // already complete
    EXPECT_TRUE(at::equal(in, pattern(200000, at::kFloat, previous_of(comm))));
  });
}

TEST_P(CommSuite, WorkWaitsWhenDestroyed) {
  ranks([&](Communicator& comm) {
    at::Tensor in = at::empty({70000}, options(at::kLong));
    comm.exchange({{pattern(70000, at::kLong, comm.rank()), next_of(comm)}}, {{in, previous_of(comm)}}, {"dropped", 0});
    EXPECT_TRUE(at::equal(in, pattern(70000, at::kLong, previous_of(comm))));
  });
}

TEST_P(CommSuite, EmptyExchangesComplete) {
  ranks([&](Communicator& comm) {
    EXPECT_TRUE(comm.exchange({}, {}, {"nothing", 0})->test());
    at::Tensor none = at::empty({0, 3}, options(at::kFloat));
    at::Tensor none2 = at::empty({0, 3}, options(at::kFloat));
    comm.exchange({{none, next_of(comm)}}, {{none2, previous_of(comm)}}, {"nothing", 1})->wait();
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
    const int next = next_of(comm), previous = previous_of(comm);
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

// Each rank sends as many blocks as the others, and all learn what each link took.
TEST_P(CommSuite, ProbesEveryLink) {
  ranks([&](Communicator& comm) {
    const CommStats before = comm.host().stats();
    const std::vector<double> seconds = probe_links(comm);
    ASSERT_EQ(seconds.size(), static_cast<size_t>(comm.size()));
    if (comm.size() == 1) return;
    for (const double link : seconds) EXPECT_TRUE(link > 0 && std::isfinite(link)) << link;
    EXPECT_EQ(comm.host().stats().bytes_sent - before.bytes_sent, 5 * ((256 << 10) + 4));
    at::Tensor all = at::empty({comm.size(), comm.size()}, at::kDouble);
    comm.host().all_gather(all, at::tensor(seconds, at::kDouble), {"what was measured"});
    EXPECT_TRUE(all.eq(all[0]).all().item<bool>()) << all;
  });
}

TEST_P(CommSuite, LargeMessages) {
  ranks([&](Communicator& comm) {
    constexpr int64_t kLength = 3'000'001;
    at::Tensor in = at::empty({kLength}, options(at::kFloat));
    comm.exchange({{pattern(kLength, at::kFloat, comm.rank()), next_of(comm)}}, {{in, previous_of(comm)}}, {"large", 0})
        ->wait();
    EXPECT_TRUE(at::equal(in, pattern(kLength, at::kFloat, previous_of(comm))));
  });
}

// ---- Tensors that ranks of a host lend to each other, and tensors that are received without memory.

constexpr int64_t kLength = 100'000;  // elements; large enough to be lent

at::Tensor lendable(Communicator& comm, at::ScalarType dtype, int seed) {
  at::Tensor tensor = comm.lendable({kLength}, options(dtype));
  tensor.copy_(pattern(kLength, dtype, seed));
  return tensor;
}
at::Tensor without_memory(at::ScalarType dtype = at::kFloat) {
  return tensor_without_memory({kLength}, options(dtype));
}

TEST_P(CommSuite, ReceivesIntoTensorsWithoutMemory) {
  ranks([&](Communicator& comm) {
    EXPECT_EQ(comm.lends_to(next_of(comm)), backend().lends);
    for (const at::ScalarType dtype : kDtypes) {
      const at::Tensor lent = without_memory(dtype), copied = without_memory(dtype);
      finish(*comm.exchange({{lendable(comm, dtype, comm.rank()), next_of(comm)},
                             {pattern(kLength, dtype, comm.rank() + 10), next_of(comm)}},
                            {{lent, previous_of(comm)}, {copied, previous_of(comm)}}, {"both", 1}));
      EXPECT_TRUE(at::equal(lent, pattern(kLength, dtype, previous_of(comm)))) << dtype;
      EXPECT_TRUE(at::equal(copied, pattern(kLength, dtype, previous_of(comm) + 10))) << dtype;
    }
  });
}

// A sender that still holds a lent tensor sees what the receiver writes to it.
TEST_P(CommSuite, LentTensorsAreTheSendersMemory) {
  ranks([&](Communicator& comm) {
    const at::Tensor mine = lendable(comm, at::kFloat, 1), came = without_memory();
    const at::Tensor mine_too = lendable(comm, at::kFloat, 2), copy = at::empty({kLength}, options(at::kFloat));
    const CommStats before = comm.stats();
    finish(*comm.exchange({{mine, next_of(comm)}, {mine_too, next_of(comm)}},
                          {{came, previous_of(comm)}, {copy, previous_of(comm)}}, {"lent", 1}));
    EXPECT_EQ(comm.stats().bytes_sent - before.bytes_sent, 2 * 4 * kLength);
    EXPECT_EQ(comm.stats().bytes_lent - before.bytes_lent, backend().lends ? 2 * 4 * kLength : 0);
    EXPECT_TRUE(at::equal(copy, pattern(kLength, at::kFloat, 2)));
    came.fill_(7);
    copy.fill_(8);
    comm.barrier({"written", 2});
    EXPECT_TRUE(at::equal(
        mine, backend().lends ? at::full({kLength}, 7, options(at::kFloat)) : pattern(kLength, at::kFloat, 1)));
    EXPECT_TRUE(at::equal(mine_too, pattern(kLength, at::kFloat, 2)));  // the receiver had memory of its own
    comm.barrier({"read", 3});
  });
}

// Around a ring each rank passes on what it has borrowed. All but the last holder free it at once.
TEST_P(CommSuite, LentTensorsArePassedOn) {
  ranks([&](Communicator& comm) {
    for (int round = 0; round < 5; ++round) {
      at::Tensor held = lendable(comm, at::kFloat, comm.rank() + round);
      for (int hop = 0; hop < comm.size(); ++hop) {
        at::Tensor came = without_memory();
        const int64_t lent = comm.stats().bytes_lent;
        comm.exchange({{held, next_of(comm)}}, {{came, previous_of(comm)}}, {"passed on", hop + 1, "hop"})->wait();
        EXPECT_EQ(comm.stats().bytes_lent - lent, backend().lends ? 4 * kLength : 0);
        held = std::move(came);
        // The memory of what was freed may be used again, but not that of what others hold.
        const at::Tensor other = lendable(comm, at::kFloat, 77);
        const int owner = (comm.rank() - hop - 1 + 2 * comm.size()) % comm.size();
        EXPECT_TRUE(at::equal(held, pattern(kLength, at::kFloat, owner + round))) << "hop " << hop;
      }
    }
  });
}

TEST_P(CommSuite, PartsOfALendableTensorAreLent) {
  ranks([&](Communicator& comm) {
    const at::Tensor mine = lendable(comm, at::kFloat, comm.rank());
    const at::Tensor first = tensor_without_memory({30'000}, options(at::kFloat));
    const at::Tensor rest = tensor_without_memory({70'000}, options(at::kFloat));
    finish(*comm.exchange({{mine.narrow(0, 70'000, 30'000), next_of(comm)}, {mine.narrow(0, 0, 70'000), next_of(comm)}},
                          {{first, previous_of(comm)}, {rest, previous_of(comm)}}, {"parts", 1}));
    const at::Tensor whole = pattern(kLength, at::kFloat, previous_of(comm));
    EXPECT_TRUE(at::equal(first, whole.narrow(0, 70'000, 30'000)));
    EXPECT_TRUE(at::equal(rest, whole.narrow(0, 0, 70'000)));
  });
}

TEST_P(CommSuite, SmallAndEmptyTensorsNeedNoMemoryEither) {
  ranks([&](Communicator& comm) {
    for (const int64_t length : {0, 1, 100}) {
      const at::Tensor mine = comm.lendable({length}, options(at::kLong));
      mine.copy_(pattern(length, at::kLong, comm.rank()));
      const at::Tensor came = tensor_without_memory({length}, options(at::kLong));
      finish(*comm.exchange({{mine, next_of(comm)}}, {{came, previous_of(comm)}}, {"small", 1}));
      EXPECT_TRUE(at::equal(came, pattern(length, at::kLong, previous_of(comm)))) << length;
    }
  });
}

TEST_P(CommSuite, LendsOnlyWithinAHostAndOnlyIfWanted) {
  ranks([&](Communicator& comm) {
    for (const bool off : {true, false}) {
      const auto apart = comm.split(0, comm.rank());
      std::vector<int> hosts(static_cast<size_t>(comm.size()));
      std::iota(hosts.begin(), hosts.end(), 0);
      off ? apart->set_lending(false) : apart->set_hosts(hosts);
      const auto part = apart->split(0, comm.rank());
      for (Communicator* c : {apart.get(), part.get()}) {
        EXPECT_FALSE(c->lends_to(next_of(comm)) && (off || comm.size() > 1));
        const at::Tensor mine = lendable(*c, at::kFloat, 1), came = without_memory();
        finish(*c->exchange({{mine, next_of(comm)}}, {{came, previous_of(comm)}}, {"not lent", 1}));
        came.fill_(7);
        comm.barrier({"written", 2});
        if (off || comm.size() > 1) {
          EXPECT_EQ(c->stats().bytes_lent, 0);
          EXPECT_TRUE(at::equal(mine, pattern(kLength, at::kFloat, 1)));
        }
      }
    }
  });
}

TEST_P(CommSuite, RefusesToSendOrSplitMissingMemory) {
  ranks([&](Communicator& comm) {
    expect_error(ErrorKind::kPlan, {"layer 1", "send buffer has no memory"}, [&] {
      comm.exchange({{without_memory(), next_of(comm)}}, {}, {"layer 1", 0});
    });
    expect_error(ErrorKind::kPlan, {"layer 1", "part of a tensor without memory"}, [&] {
      comm.exchange({}, {{without_memory().narrow(0, 0, 10), next_of(comm)}}, {"layer 1", 0});
    });
    comm.barrier({"nothing was sent", 0});
  });
}

// Lends a tensor of 400,000 bytes to rank 0, which expects another size, and calls `then` before it waits. The sender
// may notice it.
void lend_too_much(Communicator& comm, const std::function<void()>& then) {
  const auto work = comm.exchange({{lendable(comm, at::kFloat, 1), 0}}, {}, {"layer 1", 4, "step"});
  then();
  try {
    work->wait();
  } catch (const Error& e) {
    EXPECT_TRUE(e.kind() == ErrorKind::kMismatch || e.kind() == ErrorKind::kComm) << e.what();
  }
}

TEST_P(CommLending, MismatchedLentTensorsAreAnError) {
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    if (comm.rank() == 0) {
      expect_error(ErrorKind::kMismatch, {"layer 1", "step 4", rank_text(last), "400000", "200000"}, [&] {
        finish(*apart.exchange({}, {{tensor_without_memory({kLength / 2}, options(at::kFloat)), last}},
                               {"layer 1", 4, "step"}));
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart.barrier({"later", 5}); });
    } else if (comm.rank() == last) {
      lend_too_much(apart, [] {});
    }
  });
}

// While a rank computes, it only calls progress(), which raises nothing: the exchange itself must say later that it
// failed.
TEST_P(CommLending, FailuresThatProgressFindsAreRaisedByTheExchange) {
  with_faults([&](Communicator& comm, Communicator& apart, int last) {
    if (comm.rank() == 0) {
      const auto work = apart.exchange({}, {{tensor_without_memory({kLength / 2}, options(at::kFloat)), last}},
                                       {"layer 1", 4, "step"});
      comm.barrier({"the message has been sent", 0});
      for (int i = 0; i < 1000; ++i) apart.progress();
      expect_error(ErrorKind::kMismatch, {"layer 1", "step 4", rank_text(last), "400000", "200000"},
                   [&] { work->wait(); });
    } else if (comm.rank() == last) {
      lend_too_much(apart, [&] { comm.barrier({"the message has been sent", 0}); });
    } else {
      comm.barrier({"the message has been sent", 0});
    }
  });
}

// Otherwise a rank that only sends would run ahead, and would hold what it has lent in all its calls.
TEST_P(CommLending, LendingIsNotCompleteBeforeTheReceiverTakesPart) {
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    if (comm.rank() == 0) {
      const auto work = comm.exchange({{lendable(comm, at::kFloat, 1), last}}, {}, {"layer 1", 4, "step"});
      for (int i = 0; i < 1000; ++i) EXPECT_FALSE(work->test());
      comm.barrier({"the receiver takes part", 0});
      work->wait();
    } else {
      comm.barrier({"the receiver takes part", 0});
    }
    if (comm.rank() == last) {
      at::Tensor got = without_memory();
      finish(*comm.exchange({}, {{got, 0}}, {"layer 1", 4, "step"}));
      EXPECT_TRUE(at::equal(got, pattern(kLength, at::kFloat, 1)));
    }
    comm.barrier({"end", 0});
  });
}

}  // namespace
}  // namespace annulus::contract
