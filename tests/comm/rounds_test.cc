// Tests that the received sums of a reduction are aligned, whatever the length of a round's part, and where its memory
// comes from.
#include "comm/rounds.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/headers.h"
#include "comm/hosts.h"
#include "memory/pool/pool.h"

namespace annulus::comm_internal::rounds_test {
namespace {

TEST(Rounds, SumsAreAligned) {
  const RankHosts hosts(std::vector<int>{0, 0, 1, 1, 2, 2});
  const at::Tensor whole = at::zeros({6, 1503}, at::kBFloat16), out = at::zeros({1503}, at::kBFloat16);
  const OpLabel label{"aligned", 0};
  for (const int64_t most : {6, 1000, 1002}) {  // bytes; the sums of a part are fp32
    for (int rank = 0; rank < hosts.ranks(); ++rank) {
      const CollectiveHeader header =
          make_header(Collective::kReduceScatter, 0, &whole, static_cast<int>(ReduceOp::kSum), -1, label);
      Rounds rounds(rank, hosts, most, {header, out, whole, label, std::make_shared<int64_t>(0)});
      int64_t sums = 0;
      for (int64_t step = 0; step < rounds.count(); ++step) {
        for (const std::vector<Rounds::Message>& messages : {rounds.sends(step), rounds.receives(step)}) {
          for (const Rounds::Message& message : messages) {
            if (hosts.of(message.peer) == hosts.of(rank)) continue;  // values, two bytes each
            ++sums;
            EXPECT_EQ(reinterpret_cast<uintptr_t>(message.data) % sizeof(float), 0u)
                << most << " bytes, rank " << rank << ", step " << step;
          }
        }
      }
      EXPECT_GT(sums, 2) << most;
    }
  }
}

PoolStats of_gradients() { return Pool::process().reports()[static_cast<size_t>(PoolPurpose::kGradients)].stats; }

// Only the first reduction of a size takes its memory from the system.
TEST(Rounds, LaterReductionsFindTheirMemoryInThePool) {
  const RankHosts hosts(std::vector<int>{0, 0, 1});
  const at::Tensor whole = at::zeros({3, 50'000}, at::kFloat), out = at::zeros({50'000}, at::kFloat);
  const OpLabel label{"again", 0};
  const CollectiveHeader header =
      make_header(Collective::kReduceScatter, 0, &whole, static_cast<int>(ReduceOp::kSum), -1, label);
  const PoolStats before = of_gradients();
  for (int64_t i = 0; i < 5; ++i) {
    Rounds rounds(0, hosts, 1 << 20, {header, out, whole, label, std::make_shared<int64_t>(0)});
    EXPECT_EQ(of_gradients().taken - before.taken, 1);
    EXPECT_EQ(of_gradients().reused - before.reused, i);
    EXPECT_GE(of_gradients().in_use, 200'000);
    rounds.end();
    EXPECT_GE(of_gradients().in_use, 200'000) << "messages may still be under way";
    rounds.drop();
    EXPECT_EQ(of_gradients().in_use, 0);
  }
}

}  // namespace
}  // namespace annulus::comm_internal::rounds_test
