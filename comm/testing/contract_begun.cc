// The contract of communicators: nonblocking all_gather and reduce_scatter ("begun" collectives), their in-place forms,
// and waiting times by purpose.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "comm/testing/contract_fixture.h"
#include "memory/peak_bytes.h"

namespace annulus::contract {
namespace {

const std::vector<at::ScalarType> kScattered{at::kFloat, at::kDouble, at::kLong, at::kBFloat16};

bool on_cpu() { return backend().device.is_cpu(); }

// What rank `from` gives to rank `to`. Sums over 8 ranks are exact in every dtype, including bf16 with its 8 bits.
at::Tensor given(int64_t n, at::ScalarType dtype, int seed, int from, int to) {
  return pattern(n, at::kLong, seed + from * 5 + to).remainder(16).to(dtype);
}

// A begun collective and its expected result.
struct Begun {
  std::unique_ptr<Work> work;
  at::Tensor out, expected;
};

Begun begin_gather(Communicator& comm, int64_t n, at::ScalarType dtype, int seed, OpLabel label) {
  Begun begun{nullptr, at::empty({comm.size(), n}, options(dtype)), at::empty({comm.size(), n}, options(dtype))};
  for (int r = 0; r < comm.size(); ++r) begun.expected[r].copy_(pattern(n, dtype, seed + r));
  // Only the Work keeps the input.
  begun.work = comm.begin_all_gather(begun.out, pattern(n, dtype, seed + comm.rank()), label);
  return begun;
}

Begun begin_scatter(Communicator& comm, int64_t n, at::ScalarType dtype, int seed, OpLabel label) {
  Begun begun{nullptr, at::empty({n}, options(dtype)), at::zeros({n}, options(dtype))};
  const at::Tensor in = at::empty({comm.size(), n}, options(dtype));
  for (int r = 0; r < comm.size(); ++r) {
    in[r].copy_(given(n, dtype, seed, comm.rank(), r));
    begun.expected.add_(given(n, dtype, seed, r, comm.rank()));
  }
  begun.work = comm.begin_reduce_scatter(begun.out, in, label);
  return begun;
}

// A number of elements, of all pieces together, that takes at least three rounds for any number of ranks.
int64_t of_several_rounds() { return backend().large_rounds ? 9'000'000 : 100'000; }

// After this, a backend that connects ranks at their first collective has done so.
void meet_all(Communicator& comm) { finish(*begin_gather(comm, 1, at::kFloat, 0, {"meeting", 0}).work); }

TEST_P(CommSuite, BegunCollectivesOfRandomSizesAmongOtherTraffic) {
  ranks([&](Communicator& comm) {
    std::mt19937 random(11);  // the same on every rank
    const int next = next_of(comm), previous = previous_of(comm);
    const auto half = comm.split(comm.rank() % 2, comm.rank());
    for (int round = 0; round < 12; ++round) {
      std::vector<Begun> all;
      std::vector<std::unique_ptr<Communicator>> splits;
      const int operations = 2 + static_cast<int>(random() % 6);
      for (int i = 0; i < operations; ++i) {
        const int64_t n = static_cast<int64_t>(random() % 4 == 0 ? random() % 30000 : random() % 9);
        const int seed = static_cast<int>(random() % 1000);
        const at::ScalarType dtype = kScattered[random() % kScattered.size()];
        const OpLabel label{"drawn", round, "step"};
        switch (random() % 8) {
          case 0:
          case 1:
            all.push_back(begin_gather(comm, n, dtype, seed, label));
            break;
          case 2:
          case 3:
            all.push_back(begin_scatter(comm, n, dtype, seed, label));
            break;
          case 4:
            all.push_back(begin_gather(*half, n, dtype, seed, label));
            break;
          case 5: {
            Begun ring{nullptr, at::empty({n}, options(dtype)), pattern(n, dtype, seed + previous)};
            ring.work = comm.exchange({{pattern(n, dtype, seed + comm.rank()), next}}, {{ring.out, previous}}, label);
            all.push_back(std::move(ring));
            break;
          }
          case 6: {
            at::Tensor ones = at::full({n}, 1, options(at::kLong));
            comm.all_reduce(ones, ReduceOp::kSum, label);
            EXPECT_TRUE(at::equal(ones, at::full({n}, comm.size(), options(at::kLong))));
            break;
          }
          default:
            splits.push_back(comm.split(0, -comm.rank()));
            all.push_back(begin_scatter(*splits.back(), n, dtype, seed, label));
        }
      }
      // Each rank waits in its own order.
      std::mt19937 mine(static_cast<unsigned>(round * 100 + comm.rank()));
      while (!all.empty()) {
        std::swap(all[mine() % all.size()], all.back());
        all.back().work->wait();
        EXPECT_TRUE(at::equal(all.back().out, all.back().expected)) << "round " << round;
        all.pop_back();
      }
    }
  });
}

TEST_P(CommSuite, BegunCollectivesOfLargePieces) {
  ranks([&](Communicator& comm) {
    const int64_t n = of_several_rounds() / comm.size();
    Begun sum = begin_scatter(comm, n, at::kFloat, 3, {"large", 0});
    const Begun all = begin_gather(comm, n, at::kByte, 4, {"large", 1});
    all.work->wait();
    sum.work->wait();
    EXPECT_TRUE(at::equal(sum.out, sum.expected));
    EXPECT_TRUE(at::equal(all.out, all.expected));
  });
}

// Values are added from rank 0 to the last, bf16 in fp32 and rounded once. NCCL has its own order.
TEST_P(CommSuite, ReduceScatterAddsInTheOrderOfTheRanks) {
  ranks([&](Communicator& comm) {
    const int size = comm.size();
    constexpr int64_t kLength = 5001;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      at::Tensor in = at::empty({size, kLength}, at::kFloat);
      std::mt19937 random(static_cast<unsigned>(comm.rank()));
      for (int64_t i = 0; i < in.numel(); ++i) {
        in.mutable_data_ptr<float>()[i] =
            std::ldexp(static_cast<float>(random() % 100000) - 50000.F, -static_cast<int>(random() % 20));
      }
      in = in.to(options(dtype));
      at::Tensor sum = at::empty({kLength}, options(dtype)), again = at::empty_like(sum);
      comm.reduce_scatter(sum, in, {"bits", 0});
      comm.begin_reduce_scatter(again, in, {"bits", 1})->wait();
      EXPECT_TRUE(at::equal(sum, again));
      at::Tensor all = at::empty({size, size, kLength}, options(dtype));
      comm.all_gather(all, in, {"bits", 2});
      if (!on_cpu()) continue;
      at::Tensor expected = all[0][comm.rank()].to(at::kFloat).clone();
      for (int r = 1; r < size; ++r) expected.add_(all[r][comm.rank()]);
      EXPECT_TRUE(at::equal(sum, expected.to(dtype))) << dtype;
    }
  });
}

TEST_P(CommSuite, InPlace) {
  ranks([&](Communicator& comm) {
    const int size = comm.size(), rank = comm.rank();
    constexpr int64_t kLength = 7001;
    for (const bool begun : {false, true}) {
      at::Tensor all = at::full({size, kLength}, -1, options(at::kFloat));
      const at::Tensor mine = all[rank].copy_(pattern(kLength, at::kFloat, rank));
      if (begun) {
        comm.begin_all_gather(all, mine, {"in place", 0})->wait();
      } else {
        comm.all_gather(all, mine, {"in place", 0});
      }
      for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(all[r], pattern(kLength, at::kFloat, r)));
      at::Tensor expected = at::zeros({kLength}, options(at::kFloat));
      for (int r = 0; r < size; ++r) {
        all[r].copy_(given(kLength, at::kFloat, 9, rank, r));
        expected.add_(given(kLength, at::kFloat, 9, r, rank));
      }
      at::Tensor sum = all[rank];
      if (begun) {
        comm.begin_reduce_scatter(sum, all, {"in place", 1})->wait();
      } else {
        comm.reduce_scatter(sum, all, {"in place", 1});
      }
      EXPECT_TRUE(at::equal(all[rank], expected));
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        EXPECT_TRUE(at::equal(all[r], given(kLength, at::kFloat, 9, rank, r)));
      }
      // A part other than the rank's own would be overwritten while other ranks read it.
      at::Tensor shifted = all.view({-1}).slice(0, rank * kLength + (rank > 0 ? -1 : 1)).slice(0, 0, kLength);
      if (size > 1 || rank > 0) {
        expect_error(ErrorKind::kPlan, {"share memory", "this rank's part"}, [&] {
          comm.begin_all_gather(all, shifted, {"in place", 2});
        });
      }
    }
    comm.barrier({"end", 0});
  });
}

// Memory plans rely on the memory that a backend declares in addition to the tensors.
TEST_P(CommOnCpus, ReduceScatterHoldsTheDeclaredMemory) {
  ranks([&](Communicator& comm) {
    for (const int64_t n : {int64_t{0}, int64_t{1000}, of_several_rounds()}) {
      const at::Tensor in = at::zeros({comm.size(), n / comm.size()}, options(at::kFloat));
      const at::Tensor out = at::empty({n / comm.size()}, options(at::kFloat));
      const auto peak = std::make_shared<PeakBytes>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
      comm.begin_reduce_scatter(out, in, {"held", n})->wait();
      const auto says = comm.reduce_scatter_holds(static_cast<int64_t>(in.nbytes()));
      EXPECT_LE(peak->peak(), says);
      if (backend().large_rounds) {
        EXPECT_EQ(peak->peak(), says) << n;
      }
      EXPECT_EQ(peak->alive(), 0);
    }
  });
}

// Only rank 0 polls what it has begun. On the other ranks progress() of any communicator advances everything that the
// rank has begun.
TEST_P(CommSuite, ProgressOfAnyCommunicatorCompletesWhatWasBegun) {
  ranks([&](Communicator& comm) {
    const auto other = comm.split(0, comm.rank());
    const Begun sum = begin_scatter(comm, of_several_rounds() / comm.size(), at::kFloat, 1, {"gradients", 1});
    const Begun all = begin_gather(comm, 200'000, at::kFloat, 2, {"weights", 2});
    if (comm.rank() == 0) {
      while (!all.work->test() || !sum.work->test()) comm.progress();
    }
    // Rank 0 reaches this only after both are complete.
    at::Tensor word = at::zeros({1}, options(at::kLong));
    if (comm.rank() == 0) {
      for (int r = 1; r < comm.size(); ++r) other->exchange({{word, r}}, {}, {"told", 0})->wait();
    } else {
      const auto told = other->exchange({}, {{word, 0}}, {"told", 0});
      while (!told->test()) other->progress();
    }
    sum.work->wait();
    all.work->wait();
    EXPECT_TRUE(at::equal(sum.out, sum.expected));
    EXPECT_TRUE(at::equal(all.out, all.expected));
  });
}

TEST_P(CommSuite, BegunWorkWaitsWhenDestroyed) {
  ranks([&](Communicator& comm) {
    const Begun begun = [&] {
      Begun out = begin_scatter(comm, 70000, at::kLong, 5, {"dropped", 0});
      out.work.reset();
      return out;
    }();
    EXPECT_TRUE(at::equal(begun.out, begun.expected));
  });
}

TEST_P(CommPairs, BegunMismatchIsNamedOnEveryRank) {
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    const bool odd = comm.rank() == last;
    const std::string others = last == 1 ? "rank 0" : "ranks 0-" + std::to_string(last - 1);
    const auto disagree = [&](const std::vector<std::string>& parts,
                              const std::function<Begun(Communicator&, bool odd)>& begin) {
      const auto apart = comm.split(0, comm.rank());
      meet_all(*apart);
      std::vector<std::string> all = parts;
      all.push_back("on " + others);
      all.push_back("on " + rank_text(last));
      Begun before = begin_gather(*apart, 100, at::kFloat, 0, {"before", 1});
      expect_error(ErrorKind::kMismatch, all, [&] {
        const Begun begun = begin(*apart, odd);
        finish(*begun.work);
      });
      if (on_cpu()) {  // nothing was sent, so the earlier collective and the communicator are intact
        before.work->wait();
        EXPECT_TRUE(at::equal(before.out, before.expected));
        apart->barrier({"after", 2});
      } else {
        try {
          before.work->wait();
        } catch (const Error&) {
        }
      }
      comm.barrier({"next", 0});
    };
    disagree({"gradients", "step 9", "shape is [", ", 6]", ", 5]"}, [](Communicator& c, bool o) {
      return begin_scatter(c, o ? 5 : 6, at::kFloat, 0, {"gradients", 9, "step"});
    });
    disagree({"dtype is fp32", "bf16"}, [](Communicator& c, bool o) {
      return begin_gather(c, 6, o ? at::kBFloat16 : at::kFloat, 0, {"weights", 9, "step"});
    });
    disagree({"collective is all_gather", "reduce_scatter"}, [](Communicator& c, bool o) {
      return o ? begin_scatter(c, 6, at::kFloat, 0, {"unit 3", 9}) : begin_gather(c, 6, at::kFloat, 0, {"unit 3", 9});
    });
    disagree({"operation is \"unit 3\"", "\"unit 4\""}, [](Communicator& c, bool o) {
      return begin_gather(c, 6, at::kFloat, 0, {o ? "unit 4" : "unit 3", 9});
    });
    disagree({"shape is [0]", "[6]"}, [](Communicator& c, bool o) {  // the other ranks have nothing to transfer
      return begin_gather(c, o ? 6 : 0, at::kFloat, 0, {"unit 3", 9});
    });
    if (!on_cpu()) return;  // on a GPU, ranks compare blocking collectives in another way
    disagree({"collective is all_gather", "barrier"}, [](Communicator& c, bool o) {
      if (o) c.barrier({"unit 3", 9});
      return begin_gather(c, 6, at::kFloat, 0, {"unit 3", 9});
    });
  });
}

TEST_P(CommPairs, BegunCollectiveNamesTheMissingRanks) {
  ranks([&](Communicator& comm) {
    const int last = comm.size() - 1;
    for (const bool waits : {true, false}) {
      const auto apart = comm.split(0, comm.rank());
      meet_all(*apart);
      if (comm.rank() != last) {
        apart->set_timeout(Seconds(0.3));
        const Begun begun = begin_scatter(*apart, 100, at::kFloat, 0, {"gradients of layer 3", 11, "step"});
        apart->set_timeout(Seconds(3600));  // applies to what begins later
        const auto never = std::chrono::steady_clock::now() + std::chrono::seconds(15);
        expect_error(ErrorKind::kComm, {"gradients of layer 3", "step 11", rank_text(last), "0.3 s"}, [&] {
          if (waits) begun.work->wait();  // on a GPU wait() does not block
          while (!begun.work->test() && std::chrono::steady_clock::now() < never) sched_yield();
        });
        expect_error(ErrorKind::kComm, {"dead"}, [&] { begin_gather(*apart, 1, at::kFloat, 0, {"after", 12}); });
        expect_error(ErrorKind::kComm, {"dead"}, [&] { apart->barrier({"after", 12}); });
      }
      comm.barrier({"next", 0});
    }
  });
}

TEST_P(CommPairs, ExceptionAbandonsBegunCollectives) {
  with_faults([&](Communicator& comm, Communicator& apart, int) {
    meet_all(apart);
    if (comm.rank() == 0) {
      try {
        const Begun begun = begin_gather(apart, 100, at::kFloat, 0, {"weights", 0});
        throw std::runtime_error("a kernel failed");  // no other rank begins it, so this must not wait for them
      } catch (const std::runtime_error& e) {
        EXPECT_STREQ(e.what(), "a kernel failed");
      }
      expect_error(ErrorKind::kComm, {"dead", "abandoned"}, [&] { apart.barrier({"after", 1}); });
    }
  });
}

TEST_P(CommSuite, BegunCollectivesAreCountedOnCompletion) {
  ranks([&](Communicator& comm) {
    const int64_t size = comm.size();
    const auto expect = [&](const CommStats& before, int64_t number, int64_t payload, int64_t sent) {
      EXPECT_EQ(comm.stats().collectives - before.collectives, number);
      EXPECT_EQ(comm.stats().collective_payload - before.collective_payload, payload);
      EXPECT_EQ(comm.stats().collective_bytes_sent - before.collective_bytes_sent, sent);
      EXPECT_EQ(comm.stats().messages_sent, before.messages_sent);
      EXPECT_EQ(comm.stats().bytes_sent, before.bytes_sent);
    };
    const CommStats start = comm.stats();
    const Begun all = begin_gather(comm, 10, at::kBFloat16, 0, {"count", 0});
    const Begun sum = begin_scatter(comm, 6, at::kFloat, 0, {"count", 1});
    expect(start, 0, 0, 0);
    all.work->wait();
    all.work->wait();
    expect(start, 1, size * 20, (size - 1) * 20);
    while (!sum.work->test()) comm.progress();
    EXPECT_TRUE(sum.work->test());
    expect(start, 2, size * 44, (size - 1) * 44);
    at::Tensor reduced = at::zeros({size * 3}, options(at::kFloat));
    comm.all_reduce(reduced, ReduceOp::kSum, {"count", 2});
    expect(start, 3, size * 56, (size - 1) * (44 + 2 * 12));
    comm.broadcast(reduced, 0, {"count", 3});
    expect(start, 4, size * 68, (size - 1) * (44 + 3 * 12));
  });
}

// On a GPU the waits are those of the device (nccl_device_test.cc).
TEST_P(CommOnCpus, ReportsWaitsByPurpose) {
  ranks([&](Communicator& comm) {
    enum Kind { kExchange, kReduce, kGather, kOther };
    const auto kinds = [&] {
      const CommStats& s = comm.stats();
      const double named = s.exchange_wait_seconds + s.reduce_wait_seconds + s.gather_wait_seconds;
      return std::vector<double>{s.exchange_wait_seconds, s.reduce_wait_seconds, s.gather_wait_seconds,
                                 s.wait_seconds - named};
    };
    const auto waits = [&](Kind which, const std::function<void()>& body) {
      const std::vector<double> before = kinds();
      body();
      const std::vector<double> after = kinds();
      for (int kind = 0; kind < 4; ++kind) {
        // To a nanosecond, which is the unit of the clock.
        const double waited = after[static_cast<size_t>(kind)] - before[static_cast<size_t>(kind)];
        if (kind == which) {
          EXPECT_GT(waited, 1e-9) << kind;
        } else {
          EXPECT_NEAR(waited, 0, 1e-9) << kind << " while waiting for " << which;
        }
      }
    };
    at::Tensor tensor = at::zeros({10}, options(at::kFloat)), all = at::zeros({comm.size(), 10}, options(at::kFloat));
    waits(kReduce, [&] { comm.all_reduce(tensor, ReduceOp::kSum, {"waits", 0}); });
    waits(kOther, [&] { comm.barrier({"waits", 1}); });
    waits(kGather, [&] { comm.broadcast(tensor, 0, {"waits", 2}); });
    waits(kOther, [&] { comm.split(0, 0); });
    waits(kExchange, [&] {
      at::Tensor in = at::empty({10}, options(at::kFloat));
      comm.exchange({{tensor, next_of(comm)}}, {{in, previous_of(comm)}}, {"waits", 3})->wait();
    });
    waits(kReduce, [&] { comm.begin_reduce_scatter(tensor, all, {"waits", 4})->wait(); });
    waits(kGather, [&] { comm.begin_all_gather(all, tensor, {"waits", 5})->wait(); });
  });
}

}  // namespace
}  // namespace annulus::contract
