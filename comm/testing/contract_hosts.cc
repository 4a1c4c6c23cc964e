// The contract of communicators: ranks on several hosts. On every CPU backend, sums have the order that comm/hosts.h
// describes, to the bit, and the bytes sent between hosts are exactly those of the formula.
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "comm/hosts.h"
#include "comm/testing/contract_fixture.h"
#include "memory/peak_bytes.h"

namespace annulus::contract {
namespace {

// Draws hosts of consecutive ranks, the same on every rank.
std::vector<int> drawn_hosts(std::mt19937& random, int ranks) {
  std::vector<int> of{0};
  for (int r = 1; r < ranks; ++r) of.push_back(of.back() + (random() % 3 == 0 ? 1 : 0));
  return of;
}

std::string text_of(const std::vector<int>& of) {
  std::string text = "hosts";
  for (const int host : of) text += " " + std::to_string(host);
  return text;
}

// Returns a communicator of the same ranks on these hosts.
std::unique_ptr<Communicator> on_hosts(Communicator& comm, const std::vector<int>& of) {
  std::unique_ptr<Communicator> out = comm.split(0, comm.rank());
  out->set_hosts(of);
  return out;
}

// Returns the input of `rank`: values whose sums round differently in every order.
at::Tensor brought(int64_t n, at::ScalarType dtype, int seed, int rank) {
  std::mt19937 random(static_cast<unsigned>(seed * 64 + rank));
  at::Tensor values = at::empty({n}, at::kDouble);
  for (int64_t i = 0; i < n; ++i) {
    values.mutable_data_ptr<double>()[i] =
        std::ldexp(static_cast<double>(random() % 100000) - 50000, -static_cast<int>(random() % 20));
  }
  return values.to(dtype);
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  return op == ReduceOp::kSum ? at::add(a, b) : op == ReduceOp::kMax ? at::maximum(a, b) : at::minimum(a, b);
}

// Reduces by the definition: first within each host in the order of ranks, then host by host; bf16 is summed in fp32
// and rounded once.
at::Tensor by_hosts(const std::vector<at::Tensor>& inputs, const std::vector<int>& of, ReduceOp op) {
  const at::ScalarType dtype = inputs[0].scalar_type();
  std::vector<at::Tensor> sums;  // of each host
  for (size_t r = 0; r < inputs.size(); ++r) {
    const at::Tensor wide = dtype == at::kBFloat16 ? inputs[r].to(at::kFloat) : inputs[r];
    if (static_cast<size_t>(of[r]) == sums.size()) {
      sums.push_back(wide);
    } else {
      sums.back() = combine(sums.back(), wide, op);
    }
  }
  at::Tensor sum = sums[0];
  for (size_t host = 1; host < sums.size(); ++host) sum = combine(sum, sums[host], op);
  return sum.to(dtype);
}

// Returns the sum over the ranks of the bytes that each has sent to other hosts for its collectives.
int64_t crossed(Communicator& comm, const CommStats& before, const CommStats& after) {
  at::Tensor sum =
      at::full({1}, after.collective_bytes_to_other_hosts - before.collective_bytes_to_other_hosts, at::kLong);
  comm.all_reduce(sum, ReduceOp::kSum, {"crossed", 0});
  return *sum.const_data_ptr<int64_t>();
}

TEST_P(CommOnCpus, SumsOverHostsHaveTheDefinedOrder) {
  ranks([&](Communicator& comm) {
    const int size = comm.size(), rank = comm.rank();
    std::mt19937 random(5);  // the same on every rank
    for (int draw = 0; draw < 24; ++draw) {
      const std::vector<int> of = drawn_hosts(random, size);
      const auto apart = on_hosts(comm, of);
      const int hosts = of.back() + 1, seed = draw * 16;
      const int64_t n = static_cast<int64_t>(random() % 4 == 0 ? random() % (40000 / size) : random() % 9);
      const std::string what = text_of(of) + ", " + std::to_string(n);
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kLong, at::kBFloat16}) {
        const int64_t width = static_cast<int64_t>(c10::elementSize(dtype));
        // Each rank has an input [ranks, n], whose row `rank` is summed on this rank, in place or not.
        std::vector<at::Tensor> inputs, rows;
        for (int r = 0; r < size; ++r) inputs.push_back(brought(size * n, dtype, seed, r).view({size, n}));
        for (int r = 0; r < size; ++r) rows.push_back(inputs[static_cast<size_t>(r)][rank].clone());
        const at::Tensor in = inputs[static_cast<size_t>(rank)].clone();
        at::Tensor out = draw % 2 == 0 ? at::empty({n}, dtype) : in[rank];
        CommStats before = apart->stats();
        if (draw % 3 == 0) {
          apart->reduce_scatter(out, in, {"sum", draw});
        } else {
          apart->begin_reduce_scatter(out, in, {"sum", draw})->wait();
        }
        EXPECT_TRUE(at::equal(out, by_hosts(rows, of, ReduceOp::kSum))) << what << dtype;
        for (int r = 0; r < size; ++r) {
          if (r == rank) continue;
          EXPECT_TRUE(at::equal(in[r], inputs[static_cast<size_t>(rank)][r])) << what;
        }
        const bool two_levels = hosts > 1 && hosts < size;
        EXPECT_EQ(crossed(comm, before, apart->stats()),
                  (hosts - 1) * size * n * (dtype == at::kBFloat16 && two_levels ? 4 : width))
            << what << dtype;
        // Then all ranks gather one row of each rank.
        before = apart->stats();
        at::Tensor all = at::full({size, n}, -1, dtype);
        const at::Tensor mine = draw % 2 == 0 ? rows[static_cast<size_t>(rank)] : all[rank];
        if (draw % 2 == 1) at::Tensor(mine).copy_(rows[static_cast<size_t>(rank)]);
        apart->begin_all_gather(all, mine, {"gather", draw})->wait();
        for (int r = 0; r < size; ++r) {
          EXPECT_TRUE(at::equal(all[r], inputs[static_cast<size_t>(r)][r])) << what << dtype;
        }
        EXPECT_EQ(crossed(comm, before, apart->stats()), (hosts - 1) * size * n * width) << what;
      }
      // The lengths need not be multiples of the number of ranks.
      const int64_t length = static_cast<int64_t>(random() % 3 == 0 ? random() % 20000 : random() % 10);
      for (const at::ScalarType dtype : kReducible) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
          std::vector<at::Tensor> inputs;
          for (int r = 0; r < size; ++r) inputs.push_back(brought(length, dtype, seed + 1, r));
          at::Tensor sum = inputs[static_cast<size_t>(rank)].clone(), begun = sum.clone();
          const CommStats before = apart->stats();
          apart->all_reduce(sum, op, {"all_reduce", draw});
          const int64_t sent = crossed(comm, before, apart->stats());
          apart->begin_all_reduce(begun, op, {"all_reduce begun", draw})->wait();
          const at::Tensor expected = by_hosts(inputs, of, op);
          EXPECT_TRUE(at::equal(begun, expected)) << what << ", " << length << dtype;
          if (hosts == 1) continue;  // the backend's own order and number of bytes
          EXPECT_TRUE(at::equal(sum, expected)) << what << ", " << length << dtype;
          EXPECT_EQ(sent, 2 * (hosts - 1) * static_cast<int64_t>(expected.nbytes())) << what << ", " << length;
        }
      }
    }
  });
}

TEST_P(CommOnCpus, SumsOverHostsAreCloseToFp64) {
  ranks([&](Communicator& comm) {
    constexpr int64_t kLength = 3001;
    std::mt19937 random(9);
    for (int draw = 0; draw < 6; ++draw) {
      const auto apart = on_hosts(comm, drawn_hosts(random, comm.size()));
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        at::Tensor exact = at::zeros({kLength}, at::kDouble), sizes = at::zeros({kLength}, at::kDouble);
        for (int r = 0; r < comm.size(); ++r) {
          const at::Tensor row =
              brought(comm.size() * kLength, dtype, draw, r).view({comm.size(), kLength})[comm.rank()].to(at::kDouble);
          exact.add_(row);
          sizes.add_(row.abs());
        }
        at::Tensor sum = at::empty({kLength}, dtype);
        apart->reduce_scatter(
            sum, brought(comm.size() * kLength, dtype, draw, comm.rank()).view({comm.size(), kLength}), {"sum", draw});
        // The rounding of the additions in fp32 and of the result.
        const at::Tensor bound =
            sizes.mul(comm.size() * std::ldexp(1.0, -23)).add(exact.abs(), dtype == at::kFloat ? 0 : 1.0 / 256);
        EXPECT_TRUE(sum.to(at::kDouble).sub(exact).abs().le(bound).all().item<bool>()) << dtype;
      }
    }
  });
}

// Several rounds of sums at the same time as other sums and gathers.
TEST_P(CommPairsOnCpus, LargeSumsOverHostsAmongOtherTraffic) {
  ranks([&](Communicator& comm) {
    const int size = comm.size(), rank = comm.rank();
    const int64_t n = (backend().large_rounds ? 9'000'000 : 100'000) / size + 1;
    std::vector<int> of(static_cast<size_t>(size), 0);
    of.back() = 1;  // as unequal as possible
    for (int turn = 0; turn < 2; ++turn, std::fill(of.begin() + size / 2, of.end(), 1)) {
      const auto apart = on_hosts(comm, of);
      std::vector<at::Tensor> rows;
      for (int r = 0; r < size; ++r) rows.push_back(pattern(n, at::kFloat, r * 7 + rank));
      const at::Tensor in = at::empty({size, n}, at::kFloat), out = at::empty({n}, at::kFloat);
      for (int r = 0; r < size; ++r) in[r].copy_(pattern(n, at::kFloat, rank * 7 + r));
      const at::Tensor sum = pattern(n * size - 3, at::kFloat, rank), all = at::empty({size, n}, at::kByte);
      const at::Tensor ours = pattern(n, at::kByte, rank);
      const auto scatter = apart->begin_reduce_scatter(out, in, {"scatter", turn});
      const auto reduce = apart->begin_all_reduce(sum, ReduceOp::kSum, {"reduce", turn});
      const auto gather = apart->begin_all_gather(all, ours, {"gather", turn});
      gather->wait();
      reduce->wait();
      while (!scatter->test()) comm.progress();
      EXPECT_TRUE(at::equal(out, by_hosts(rows, of, ReduceOp::kSum)));
      at::Tensor expected = at::zeros({n * size - 3}, at::kFloat);  // exact in any order
      for (int r = 0; r < size; ++r) expected.add_(pattern(n * size - 3, at::kFloat, r));
      EXPECT_TRUE(at::equal(sum, expected));
      for (int r = 0; r < size; ++r) EXPECT_TRUE(at::equal(all[r], pattern(n, at::kByte, r)));
    }
  });
}

TEST_P(CommOnCpus, SumsOverHostsHoldTheDeclaredMemory) {
  ranks([&](Communicator& comm) {
    std::mt19937 random(3);
    for (int draw = 0; draw < 8; ++draw) {
      const auto apart = on_hosts(comm, drawn_hosts(random, comm.size()));
      const int64_t n = draw % 2 == 0 ? 1000 : backend().large_rounds ? 9'000'000 : 100'000;
      const at::Tensor in = at::zeros({comm.size(), n / comm.size()}, at::kFloat);
      const at::Tensor out = at::empty({n / comm.size()}, at::kFloat);
      const auto peak = std::make_shared<PeakBytes>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
      apart->begin_reduce_scatter(out, in, {"held", n})->wait();
      const auto says = apart->reduce_scatter_holds(static_cast<int64_t>(in.nbytes()));
      EXPECT_LE(peak->peak(), says);
      if (backend().large_rounds) {
        EXPECT_EQ(peak->peak(), says) << n;
      }
      EXPECT_EQ(peak->alive(), 0);
    }
  });
}

TEST_P(CommOnCpus, SplitsKnowTheirHosts) {
  ranks([&](Communicator& comm) {
    const int size = comm.size();
    std::vector<int> of;
    for (int r = 0; r < size; ++r) of.push_back(7 - r / 2);  // pairs; the numbers of hosts do not matter
    const auto apart = on_hosts(comm, of);
    EXPECT_EQ(apart->hosts().count(), (size + 1) / 2);
    EXPECT_EQ(apart->hosts().groups().count(), size > 2 ? (size + 1) / 2 : 1);
    const auto one_each = apart->split(comm.rank() % 2, -comm.rank());
    EXPECT_EQ(one_each->hosts().count(), one_each->size());
    EXPECT_EQ(one_each->hosts().groups().count(), 1);
    const auto inside = apart->split(comm.rank() / 2, 0);
    EXPECT_EQ(inside->hosts().count(), 1);
    // The ranks of a host are not consecutive: sums are those of one host, but bytes to other hosts are still counted.
    std::vector<int> mixed;
    for (int r = 0; r < size; ++r) mixed.push_back(r % 2);
    const auto scattered = on_hosts(comm, mixed);
    EXPECT_EQ(scattered->hosts().groups().count(), 1);
    at::Tensor out = at::empty({5}, at::kFloat);
    scattered->reduce_scatter(out, at::full({size, 5}, 1, at::kFloat), {"mixed", 0});
    EXPECT_TRUE(at::equal(out, at::full({5}, size, at::kFloat)));
    const int others = comm.rank() % 2 == 0 ? size / 2 : (size + 1) / 2;
    EXPECT_EQ(scattered->stats().collective_bytes_to_other_hosts, others * 20);
    expect_error(ErrorKind::kPlan, {"one host for each rank"},
                 [&] { scattered->set_hosts(std::vector<int>(static_cast<size_t>(size + 1), 0)); });
  });
}

TEST_P(CommSuite, CountsMessagesToOtherHosts) {
  ranks([&](Communicator& comm) {
    std::vector<int> of;
    for (int r = 0; r < comm.size(); ++r) of.push_back(r / 2);
    const auto apart = on_hosts(comm, of);
    const int next = next_of(comm), previous = previous_of(comm);
    const at::Tensor in = at::empty({10}, options(at::kFloat));
    apart->exchange({{at::zeros({10}, options(at::kFloat)), next}}, {{in, previous}}, {"ring", 0})->wait();
    EXPECT_EQ(apart->stats().bytes_sent, 40);
    EXPECT_EQ(apart->stats().bytes_to_other_hosts, next / 2 != comm.rank() / 2 ? 40 : 0);
  });
}

}  // namespace
}  // namespace annulus::contract
