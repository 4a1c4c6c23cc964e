// Attention gives the same bits in every order in which ranks can come to their transfers (comm/testing/orders.h).
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "comm/testing/orders.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::orders_test {
namespace {

constexpr int kRanks = 4;
using Results = std::array<std::vector<at::Tensor>, kRanks>;

// Forward and backward of each rank.
Results run_in(RankOrder& order, const PlanRequest& request, const testing::Inputs& in) {
  Results results;
  run_ranks(
      kRanks,
      [&](Communicator& comm) {
        AttentionCall call;
        call.request = request;
        call.comm = &comm;
        const auto r = static_cast<size_t>(comm.rank());
        const std::vector<Span> queries = query_layout(request).spans[r], keys = key_layout(request).spans[r];
        const at::Tensor q = testing::rows_of(in.q, 1, queries), k = testing::rows_of(in.k, 1, keys),
                         v = testing::rows_of(in.v, 1, keys), dout = testing::rows_of(in.dout, 1, queries);
        const AttentionOutput out = attention_forward(q, k, v, call);
        const AttentionGradients grads = attention_backward(dout, q, k, v, out);
        results[r] = {out.out, out.lse, grads.dq, grads.dk, grads.dv};
      },
      at::kCPU, &order);
  return results;
}

TEST(Orders, AttentionHasTheSameBitsInEach) {
  using K = ScheduleKind;
  struct Case {
    K schedule;
    int within;
  };
  for (const auto& [schedule, within] : {Case{K::kRing, 0},
                                         {K::kAllGather, 0},
                                         {K::kGroupCast, 2},
                                         {K::kDoubleRing, 2},
                                         {K::kUlysses, 2},
                                         {K::kUlyssesRing, 2},
                                         {K::kMesh, 2}}) {
    PlanRequest request = testing::causal_zigzag(kRanks, 50);
    request.schedule = schedule;
    request.within = within;
    const testing::Inputs in = testing::random_inputs(request.shape, 8, at::kFloat);
    Results first;
    const auto found = testing::find_failing_order(
        [&](RankOrder& order) {
          const Results results = run_in(order, request, in);
          if (first[0].empty()) first = results;
          for (size_t r = 0; r < kRanks; ++r) {
            for (size_t i = 0; i < results[r].size(); ++i) {
              if (!at::equal(results[r][i], first[r][i])) return "other bits on rank " + std::to_string(r);
            }
          }
          return std::string();
        },
        {.orders = 10});
    EXPECT_FALSE(found) << to_string(schedule) << ": " << (found ? found->failure + "\n" + found->events : "");
  }
}

}  // namespace
}  // namespace annulus::orders_test
