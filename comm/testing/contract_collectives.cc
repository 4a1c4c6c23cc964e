// The contract of communicators: blocking collectives, splits and texts.
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "comm/testing/contract_fixture.h"

namespace annulus::contract {
namespace {

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

TEST_P(CommSuite, AllReduceIsBitIdenticalOnEveryRankAndRun) {
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
    // Two halves, each with its ranks in reverse order.
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
    // Because of the reverse order, the previous rank in the half is the next rank of the same parity.
    const int previous = comm.rank() + 2 < comm.size() ? comm.rank() + 2 : comm.rank() % 2;
    EXPECT_TRUE(at::equal(in, at::full({5}, previous, options(at::kLong))));
    // A split of a split, and ranks that join no part.
    auto alone = half->split(half->rank(), 0);
    ASSERT_TRUE(alone);
    EXPECT_EQ(alone->size(), 1);
    auto first = comm.split(comm.rank() == 0 ? 0 : -1, 0);
    EXPECT_EQ(first != nullptr, comm.rank() == 0);
    comm.barrier({"end", 0});
  });
}

// The library decides how many bytes a collective sends, so its payload does not count as bytes sent.
TEST_P(CommSuite, CountsCollectivesApartFromMessages) {
  ranks([&](Communicator& comm) {
    const int64_t size = comm.size();
    CommStats before = comm.stats();
    const auto counted = [&](int64_t payload) {
      const CommStats& now = comm.stats();
      EXPECT_EQ(now.collectives - before.collectives, 1);
      EXPECT_EQ(now.collective_payload - before.collective_payload, payload);
      EXPECT_EQ(now.messages_sent, before.messages_sent);
      EXPECT_EQ(now.bytes_sent, before.bytes_sent);
      EXPECT_EQ(now.messages_received, before.messages_received);
      EXPECT_EQ(now.bytes_received, before.bytes_received);
      before = now;
    };
    at::Tensor doubles = at::zeros({5, 2}, options(at::kDouble));
    comm.all_reduce(doubles, ReduceOp::kMax, {"count", 0});
    counted(10 * 8);
    at::Tensor bytes = at::zeros({7}, options(at::kByte));
    at::Tensor gathered = at::empty({size, 7}, options(at::kByte));
    comm.all_gather(gathered, bytes, {"count", 1});
    counted(size * 7);
    at::Tensor floats = at::zeros({size, 6}, options(at::kFloat));
    at::Tensor sum = at::empty({6}, options(at::kFloat));
    comm.reduce_scatter(sum, floats, {"count", 2});
    counted(size * 6 * 4);
    comm.broadcast(bytes, comm.size() - 1, {"count", 3});
    counted(7);
    comm.barrier({"count", 4});
    counted(0);
    comm.split(0, 0);
    counted(0);
    // Collectives that are refused or on which ranks disagree are not counted.
    EXPECT_THROW(comm.broadcast(bytes, comm.size(), {"count", 5}), Error);
    if (size > 1) {
      EXPECT_THROW(comm.barrier({"count", comm.rank()}), Error);
    }
    EXPECT_EQ(comm.stats().collectives, before.collectives);
    EXPECT_EQ(comm.stats().collective_payload, before.collective_payload);
  });
}

// A rank that has returned from a collective overwrites its tensors while others may still be in it. The thread
// sanitizer always finds a backend that returns too early; without it, wrong results of the other ranks may show it.
TEST_P(CommSuite, TensorsOfACollectiveMayBeOverwrittenAtOnce) {
  ranks([&](Communicator& comm) {
    constexpr int64_t kLength = 1 << 16;
    const int size = comm.size();
    for (int round = 0; round < 8; ++round) {
      const int root = round % size;
      at::Tensor sent = pattern(kLength, at::kFloat, comm.rank() + round);
      comm.broadcast(sent, root, {"broadcast", round});
      const at::Tensor came = comm.rank() == root ? at::Tensor() : sent.clone();
      sent.fill_(-1);
      if (came.defined()) {
        EXPECT_TRUE(at::equal(came, pattern(kLength, at::kFloat, root + round)));
      }

      at::Tensor in = pattern(kLength, at::kFloat, comm.rank() + round);
      at::Tensor all = at::empty({size, kLength}, options(at::kFloat));
      comm.all_gather(all, in, {"all_gather", round});
      in.fill_(-1);
      for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(all[r], pattern(kLength, at::kFloat, r + round)));

      at::Tensor expected = at::zeros({kLength}, options(at::kFloat));
      for (int r = 0; r < size; ++r) expected.add_(pattern(kLength, at::kFloat, r + round));
      at::Tensor parts = at::empty({size, kLength}, options(at::kFloat));
      for (int r = 0; r < size; ++r) parts[r].copy_(pattern(kLength, at::kFloat, comm.rank() + round));
      at::Tensor part = at::empty({kLength}, options(at::kFloat));
      comm.reduce_scatter(part, parts, {"reduce_scatter", round});
      parts.fill_(-1);
      EXPECT_TRUE(at::equal(part, expected));

      at::Tensor sum = pattern(kLength, at::kFloat, comm.rank() + round);
      comm.all_reduce(sum, ReduceOp::kSum, {"all_reduce", round});
      const at::Tensor summed = sum.clone();
      sum.fill_(-1);
      EXPECT_TRUE(at::equal(summed, expected));
    }
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

}  // namespace
}  // namespace annulus::contract
