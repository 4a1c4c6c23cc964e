// The tests that every backend passes. Faults are tried on a communicator split off for the purpose, so that the one
// the test began with can end it with a barrier.
#include "tests/comm/suite.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <memory>
#include <random>
#include <stdexcept>

#include "common/error.h"

namespace annulus::comm_test {
namespace {

const at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kByte};
const at::ScalarType kReducible[] = {at::kFloat, at::kDouble, at::kLong};

class CommSuite : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!backend().unavailable.empty()) GTEST_SKIP() << backend().unavailable;
  }
  void ranks(const std::function<void(Communicator&)>& body) { backend().run(GetParam(), body); }
};

at::TensorOptions options(at::ScalarType dtype) { return at::TensorOptions().dtype(dtype).device(backend().device); }

// Values that say which rank made them and differ along the tensor; exact in every dtype.
at::Tensor pattern(int64_t n, at::ScalarType dtype, int seed) {
  at::Tensor values = at::empty({n}, at::kLong);
  auto* data = values.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; ++i) data[i] = (i * 7 + seed * 31) % 120;
  return values.to(options(dtype));
}

template <typename Body>
void expect_error(ErrorKind kind, const std::vector<std::string>& parts, Body body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.exit_code(), static_cast<int>(kind)) << e.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << "\"" << part << "\" is not in: " << e.what();
    }
    EXPECT_EQ(std::string(e.what()).rfind("[comm] ", 0), 0U) << e.what();
    return;
  } catch (const std::exception& e) {
    ADD_FAILURE() << "an exception of another type: " << e.what();
    return;
  }
  ADD_FAILURE() << "no error";
}

// Two ranks exchange a word each, and wait for it: a backend that connects to a peer at the first message has done so.
void meet(Communicator& comm, int a, int b) {
  if (comm.rank() != a && comm.rank() != b) return;
  const int peer = comm.rank() == a ? b : a;
  const at::Tensor out = at::zeros({1}, options(at::kLong));
  const at::Tensor in = at::empty({1}, options(at::kLong));
  auto work = comm.exchange({{out, peer}}, {{in, peer}}, {"meeting", 0});
  while (!work->test()) sched_yield();
}

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

TEST_P(CommSuite, KnowsItself) {
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
    // To every rank, oneself included, three messages of different lengths, one of them empty.
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
      std::vector<std::pair<at::Tensor, at::Tensor>> received;  // (what came, what should)
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
    work->wait();  // nothing left to do
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

TEST_P(CommSuite, NothingToDo) {
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
    EXPECT_EQ(comm.stats().bytes_sent, 0);
    EXPECT_EQ(comm.stats().bytes_received, 0);
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

TEST_P(CommSuite, AllReduce) {
  ranks([&](Communicator& comm) {
    const int size = comm.size();
    for (const at::ScalarType dtype : kReducible) {
      for (const int64_t length : {1, 2, 7, 1000, 50001}) {
        at::Tensor sum = at::zeros({length}, options(dtype));
        for (int r = 0; r < size; ++r) sum.add_(pattern(length, dtype, r));
        at::Tensor tensor = pattern(length, dtype, comm.rank());
        comm.all_reduce(tensor, ReduceOp::kSum, {"sum", length});
        EXPECT_TRUE(at::equal(tensor, sum)) << dtype << " " << length;
        at::Tensor high = at::full({length}, comm.rank() - 1, options(dtype));
        comm.all_reduce(high, ReduceOp::kMax, {"max", length});
        EXPECT_TRUE(at::equal(high, at::full({length}, size - 2, options(dtype))));
        at::Tensor low = at::full({length}, comm.rank() - 1, options(dtype));
        comm.all_reduce(low, ReduceOp::kMin, {"min", length});
        EXPECT_TRUE(at::equal(low, at::full({length}, -1, options(dtype))));
      }
    }
  });
}

TEST_P(CommSuite, SumsAreTheSameBitsEverywhereAndEveryTime) {
  ranks([&](Communicator& comm) {
    for (const int64_t length : {5, 4099, 300001}) {
      at::Tensor input = at::empty({length}, at::kFloat);
      std::mt19937 random(static_cast<unsigned>(comm.rank()));
      for (int64_t i = 0; i < length; ++i) {
        input.mutable_data_ptr<float>()[i] = std::ldexp(static_cast<float>(random() % 100000), -(int(random() % 20)));
      }
      input = input.to(backend().device);
      at::Tensor once = input.clone();
      at::Tensor twice = input.clone();
      comm.all_reduce(once, ReduceOp::kSum, {"bits", 0});
      comm.all_reduce(twice, ReduceOp::kSum, {"bits", 1});
      EXPECT_TRUE(at::equal(once, twice));
      at::Tensor all = at::empty({comm.size(), length}, options(at::kFloat));
      comm.all_gather(all, once, {"bits", 2});
      for (int r = 0; r < comm.size(); ++r) EXPECT_TRUE(at::equal(all[r], once));
    }
  });
}

TEST_P(CommSuite, AllGather) {
  ranks([&](Communicator& comm) {
    for (const at::ScalarType dtype : kDtypes) {
      at::Tensor in = pattern(33, dtype, comm.rank()).view({3, 11});
      at::Tensor out = at::empty({comm.size(), 3, 11}, options(dtype));
      comm.all_gather(out, in, {"gather", 0});
      for (int r = 0; r < comm.size(); ++r) EXPECT_TRUE(at::equal(out[r], pattern(33, dtype, r).view({3, 11})));
    }
  });
}

TEST_P(CommSuite, ReduceScatter) {
  ranks([&](Communicator& comm) {
    for (const at::ScalarType dtype : kReducible) {
      for (const int64_t length : {1, 13, 9999}) {
        at::Tensor in = at::empty({comm.size(), length}, options(dtype));
        at::Tensor expected = at::zeros({length}, options(dtype));
        for (int r = 0; r < comm.size(); ++r) {
          in[r].copy_(pattern(length, dtype, comm.rank() * 5 + r));
          expected.add_(pattern(length, dtype, r * 5 + comm.rank()));
        }
        at::Tensor out = at::empty({length}, options(dtype));
        comm.reduce_scatter(out, in, {"scatter", 0});
        EXPECT_TRUE(at::equal(out, expected)) << dtype << " " << length;
      }
    }
  });
}

TEST_P(CommSuite, Broadcast) {
  ranks([&](Communicator& comm) {
    for (const at::ScalarType dtype : kDtypes) {
      for (int root = 0; root < comm.size(); ++root) {
        at::Tensor tensor = pattern(777, dtype, comm.rank());
        comm.broadcast(tensor, root, {"broadcast", root});
        EXPECT_TRUE(at::equal(tensor, pattern(777, dtype, root)));
      }
    }
  });
}

TEST_P(CommSuite, Split) {
  ranks([&](Communicator& comm) {
    // Two halves, in reverse order.
    auto half = comm.split(comm.rank() % 2, -comm.rank());
    const int members = (comm.size() + 1 - comm.rank() % 2) / 2;
    ASSERT_TRUE(half);
    EXPECT_EQ(half->size(), members);
    EXPECT_EQ(half->rank(), members - 1 - comm.rank() / 2);
    at::Tensor sum = at::full({3}, comm.rank(), options(at::kLong));
    half->all_reduce(sum, ReduceOp::kSum, {"half", 0});
    int64_t expected = 0;
    for (int r = comm.rank() % 2; r < comm.size(); r += 2) expected += r;
    EXPECT_TRUE(at::equal(sum, at::full({3}, expected, options(at::kLong))));
    at::Tensor in = at::empty({5}, options(at::kLong));
    half->exchange({{at::full({5}, comm.rank(), options(at::kLong)), (half->rank() + 1) % members}},
                   {{in, (half->rank() + members - 1) % members}}, {"half", 1})
        ->wait();
    // The previous of the half is the next of the same parity, because of the reverse order.
    const int previous = comm.rank() + 2 < comm.size() ? comm.rank() + 2 : comm.rank() % 2;
    EXPECT_TRUE(at::equal(in, at::full({5}, previous, options(at::kLong))));
    // A split of a split, and ranks that join nothing.
    auto alone = half->split(half->rank(), 0);
    ASSERT_TRUE(alone);
    EXPECT_EQ(alone->size(), 1);
    auto first = comm.split(comm.rank() == 0 ? 0 : -1, 0);
    EXPECT_EQ(first != nullptr, comm.rank() == 0);
    comm.barrier({"end", 0});
  });
}

TEST_P(CommSuite, RefusesWhatItCannotCarry) {
  ranks([&](Communicator& comm) {
    at::Tensor good = at::zeros({4, 6}, options(at::kFloat));
    const auto refused = [&](const std::vector<std::string>& parts, const std::function<void()>& body) {
      expect_error(ErrorKind::kPlan, parts, body);
    };
    const int me = comm.rank();
    refused({"layer 3", "step 2", "not contiguous", "[6,4]"}, [&] {
      comm.exchange({{good.t(), me}}, {}, {"layer 3", 2});
    });
    refused({"receive buffer", "not contiguous"}, [&] { comm.exchange({}, {{good.t(), me}}, {"layer 3", 2}); });
    refused({"undefined"}, [&] { comm.exchange({{at::Tensor(), me}}, {}, {"layer 3", 2}); });
    refused({"peer " + std::to_string(comm.size())}, [&] { comm.exchange({{good, comm.size()}}, {}, {"x", 0}); });
    refused({"peer -1"}, [&] { comm.exchange({}, {{good, -1}}, {"x", 0}); });
    refused({"meta"}, [&] { comm.exchange({{good.to(at::kMeta), me}}, {}, {"x", 0}); });
    at::Tensor transposed = good.t();
    refused({"not contiguous"}, [&] { comm.all_reduce(transposed, ReduceOp::kSum, {"x", 0}); });
    refused({"not contiguous"}, [&] { comm.broadcast(transposed, 0, {"x", 0}); });
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kByte}) {
      at::Tensor narrow = at::zeros({3}, options(dtype));
      refused({"cannot reduce"}, [&] { comm.all_reduce(narrow, ReduceOp::kSum, {"x", 0}); });
      at::Tensor all = at::zeros({comm.size(), 3}, options(dtype));
      refused({"cannot reduce"}, [&] { comm.reduce_scatter(narrow, all, {"x", 0}); });
    }
    refused({"[ranks, ...input]"}, [&] { comm.all_gather(good, good, {"x", 0}); });
    at::Tensor wide = at::zeros({comm.size(), 4, 6}, options(at::kDouble));
    refused({"fp64", "fp32"}, [&] { comm.all_gather(wide, good, {"x", 0}); });
    refused({"input is"}, [&] { comm.reduce_scatter(good, good, {"x", 0}); });
    refused({"root " + std::to_string(comm.size())}, [&] { comm.broadcast(good, comm.size(), {"x", 0}); });
    comm.barrier({"nothing was sent", 0});
  });
}

TEST_P(CommSuite, RanksThatDisagreeAllKnow) {
  ranks([&](Communicator& comm) {
    if (comm.size() < 2) return;
    const int last = comm.size() - 1;
    const bool odd = comm.rank() == last;
    const std::string others = last == 1 ? "rank 0" : "ranks 0-" + std::to_string(last - 1);
    const auto disagree = [&](const std::vector<std::string>& parts, const std::function<void()>& body) {
      std::vector<std::string> all = parts;
      all.push_back("on " + others);
      all.push_back("on " + rank_text(last));
      expect_error(ErrorKind::kMismatch, all, body);
    };
    at::Tensor tensor = at::zeros({odd ? 5 : 6}, options(at::kFloat));
    disagree({"gradients", "step 9", "shape is [6]", "[5] on"}, [&] {
      comm.all_reduce(tensor, ReduceOp::kSum, {"gradients", 9});
    });
    at::Tensor typed = at::zeros({6}, options(odd ? at::kLong : at::kFloat));
    disagree({"dtype is fp32", "int64"}, [&] { comm.all_reduce(typed, ReduceOp::kSum, {"gradients", 9}); });
    at::Tensor same = at::zeros({6}, options(at::kFloat));
    disagree({"reduction is sum", "max"}, [&] {
      comm.all_reduce(same, odd ? ReduceOp::kMax : ReduceOp::kSum, {"gradients", 9});
    });
    disagree({"root is 0"}, [&] { comm.broadcast(same, odd ? 1 : 0, {"parameters", 0}); });
    disagree({"operation is \"loss\"", "\"norm\""}, [&] {
      comm.all_reduce(same, ReduceOp::kSum, {odd ? "norm" : "loss", 0});
    });
    disagree({"step is 3", "4 on"}, [&] { comm.barrier({"barrier", odd ? 4 : 3}); });
    disagree({"collective is all_reduce", "broadcast"}, [&] {
      if (odd) {
        comm.broadcast(same, 0, {"x", 0});
      } else {
        comm.all_reduce(same, ReduceOp::kSum, {"x", 0});
      }
    });
    disagree({"collective is split", "barrier"}, [&] {
      if (odd) {
        comm.barrier({"split", 0});
      } else {
        comm.split(0, 0);
      }
    });
    // Nothing was sent: the communicator lives.
    comm.all_reduce(same, ReduceOp::kSum, {"after", 0});
  });
}

TEST_P(CommSuite, MessagesOfAnotherSizeOrDtype) {
  struct Case {
    int64_t sent;
    int64_t expected;
    at::ScalarType sent_dtype;
    const char* text;
  };
  const Case cases[] = {{100, 50, at::kFloat, "200"},
                        {50, 100, at::kFloat, "400"},
                        {200000, 100, at::kFloat, "400"},
                        {100, 200000, at::kFloat, "800000"},
                        {50, 100, at::kDouble, "fp64"}};
  ranks([&](Communicator& comm) {
    if (comm.size() < 2) return;
    const int last = comm.size() - 1;
    for (const Case& c : cases) {
      auto apart = comm.split(0, comm.rank());
      meet(*apart, 0, last);
      // The sender of a long message waits in vain for it to be taken.
      apart->set_timeout(Seconds(comm.rank() == last ? 0.3 : 20));
      at::Tensor in = at::empty({c.expected}, options(at::kFloat));
      at::Tensor out = at::zeros({c.sent}, options(c.sent_dtype));
      if (comm.rank() == 0) {
        expect_error(ErrorKind::kMismatch, {"layer 1", "step 4", rank_text(last), c.text}, [&] {
          auto work = apart->exchange({}, {{in, last}}, {"layer 1", 4});
          work->wait();
          while (!work->test()) sched_yield();  // on a GPU wait() does not block
        });
        expect_error(ErrorKind::kComm, {"dead"}, [&] { apart->barrier({"later", 5}); });
      } else if (comm.rank() == last) {
        try {
          apart->exchange({{out, 0}}, {}, {"layer 1", 4})->wait();
        } catch (const Error& e) {
          EXPECT_TRUE(e.kind() == ErrorKind::kMismatch || e.kind() == ErrorKind::kComm) << e.what();
        }
      }
      comm.barrier({"next case", 0});
    }
  });
}

TEST_P(CommSuite, PeerThatNeverComes) {
  ranks([&](Communicator& comm) {
    if (comm.size() < 2) return;
    const int last = comm.size() - 1;
    auto apart = comm.split(0, comm.rank());
    EXPECT_EQ(apart->timeout(), comm.timeout());
    meet(*apart, 0, last);
    if (comm.rank() == 0) {
      apart->set_timeout(Seconds(0.2));
      at::Tensor in = at::empty({512}, options(at::kDouble));
      at::Tensor out = at::empty({512}, options(at::kDouble));
      std::unique_ptr<Work> work = apart->exchange({{out, last}}, {{in, last}}, {"attention backward", 7});
      expect_error(ErrorKind::kComm, {"attention backward", "step 7", rank_text(last), "4096 bytes", "0.2 s"}, [&] {
        work->wait();
        while (!work->test()) sched_yield();  // on a GPU wait() does not block
      });
      expect_error(ErrorKind::kComm, {"attention forward", "step 8", "dead"}, [&] {
        apart->exchange({{out, last}}, {}, {"attention forward", 8});
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart->barrier({"after", 9}); });
    }
    comm.barrier({"end", 0});
  });
}

TEST_P(CommSuite, CollectiveNamesTheRanksThatDoNotCome) {
  ranks([&](Communicator& comm) {
    if (comm.size() < 2) return;
    const int last = comm.size() - 1;
    auto apart = comm.split(0, comm.rank());
    if (comm.rank() != last) {
      apart->set_timeout(Seconds(0.3));
      at::Tensor tensor = at::zeros({8}, options(at::kFloat));
      expect_error(ErrorKind::kComm, {"gradients", "step 11", rank_text(last)}, [&] {
        apart->all_reduce(tensor, ReduceOp::kSum, {"gradients", 11});
      });
      expect_error(ErrorKind::kComm, {"dead"}, [&] { apart->barrier({"after", 12}); });
    }
    comm.barrier({"end", 0});
  });
}

TEST_P(CommSuite, AnotherErrorAbandonsTheTransfer) {
  ranks([&](Communicator& comm) {
    if (comm.size() < 2) return;
    auto apart = comm.split(0, comm.rank());
    meet(*apart, 0, 1);
    if (comm.rank() == 0) {
      at::Tensor in = at::empty({9}, options(at::kFloat));
      try {
        auto work = apart->exchange({}, {{in, 1}}, {"abandoned", 0});
        throw std::runtime_error("a kernel failed");  // the transfer cannot complete: this must not wait for it
      } catch (const std::runtime_error& e) {
        EXPECT_STREQ(e.what(), "a kernel failed");
      }
      expect_error(ErrorKind::kComm, {"dead", "abandoned"}, [&] { apart->barrier({"after", 1}); });
    }
    comm.barrier({"end", 0});
  });
}

TEST_P(CommSuite, GathersTexts) {
  ranks([&](Communicator& comm) {
    const auto text_of = [](int r) {
      return std::string(static_cast<size_t>(r * r * 100), static_cast<char>('a' + r));
    };
    const std::vector<std::string> all = all_gather_text(comm, text_of(comm.rank()), {"texts", 0});
    ASSERT_EQ(all.size(), static_cast<size_t>(comm.size()));
    for (int r = 0; r < comm.size(); ++r) EXPECT_EQ(all[static_cast<size_t>(r)], text_of(r));
    EXPECT_EQ(all_gather_text(comm, "", {"texts", 1}), std::vector<std::string>(static_cast<size_t>(comm.size())));
    const std::string binary("\0\n\xff", 3);
    EXPECT_EQ(all_gather_text(comm, binary, {"texts", 2}).back(), binary);
  });
}

TEST_P(CommSuite, AgreementNamesRanksAndFields) {
  ranks([&](Communicator& comm) {
    const bool odd = comm.rank() == comm.size() - 1;
    require_agreement(comm, {{"a", "1"}, {"b", ""}}, {"attention forward", 1});
    require_agreement(comm, {}, {"attention forward", 2});
    if (comm.size() < 2) return;
    const std::string others = comm.size() == 2 ? "rank 0" : "ranks 0-" + std::to_string(comm.size() - 2);
    expect_error(ErrorKind::kMismatch,
                 {"before attention forward, call 12: shape is [1,128] on " + others + ", [1,64] on " +
                  rank_text(comm.size() - 1)},
                 [&] {
                   require_agreement(comm, {{"dtype", "fp32"}, {"shape", odd ? "[1,64]" : "[1,128]"}},
                                     {"attention forward", 12});
                 });
    // Of long values only the lines that differ are shown.
    const std::string config = "steps = 3\n[model]\nwidth = 64\nheads = 4\n";
    const std::string other = "steps = 3\n[model]\nwidth = 32\nheads = 4\ntied = true\n";
    expect_error(ErrorKind::kMismatch,
                 {"config: model.width is 64 on " + others + ", 32 on", "model.tied is absent on"}, [&] {
                   require_agreement(comm, {{"config", odd ? other : config}}, {"start", 0});
                 });
    try {
      require_agreement(comm, {{"config", odd ? other : config}}, {"start", 0});
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("heads"), std::string::npos) << e.what();
    }
    expect_error(ErrorKind::kMismatch, {"extra is absent on " + others}, [&] {
      std::vector<Field> fields{{"a", "1"}};
      if (odd) fields.push_back({"extra", "x:y"});
      require_agreement(comm, fields, {"start", 0});
    });
    require_agreement(comm, {{"a", "1"}}, {"start", 1});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommSuite, testing::ValuesIn(backend().sizes), testing::PrintToStringParamName());

}  // namespace
}  // namespace annulus::comm_test
