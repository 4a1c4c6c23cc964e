// Tests of the proof that ranks make together, and of when attention requires it.
#include "attention/execution/prove.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/proof/plans.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/caches.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::prove_test {
namespace {

using testing::causal_zigzag;
using testing::expect_refused_everywhere;
using testing::Mistake;
using testing::planted_mistakes;

class PlantedMistakeOverRanks : public ::testing::TestWithParam<Mistake> {};

TEST_P(PlantedMistakeOverRanks, IsRaisedOnEveryRank) {
  std::vector<Program> programs = testing::programs_of(GetParam().request);
  const std::shared_ptr<const Pattern> pattern = cached_pattern(programs[0].request);
  const auto prove = [&](Communicator& comm) {
    const Program& own = programs[static_cast<size_t>(comm.rank())];
    const RankPlan plan(own.request, own);
    plan.share(pattern.get());
    prove_together(plan, comm);
  };
  run_ranks(GetParam().request.ranks, prove);
  GetParam().plant(programs);
  std::atomic<int> raised = 0;
  run_ranks(GetParam().request.ranks, [&](Communicator& comm) {
    try {
      prove(comm);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInternal);
      EXPECT_NE(std::string(error.what()).find("is wrong: "), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("rank"), std::string::npos) << error.what();
      ++raised;
    }
  });
  EXPECT_EQ(raised, GetParam().request.ranks);
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedMistakeOverRanks, ::testing::ValuesIn(planted_mistakes()),
                         [](const auto& info) { return info.param.name; });

// Makes one call with this rank's rows. Returns how many messages the rank sent in addition to those of the plan: those
// of the comparison before every call, and those of the proof.
int64_t messages_of(const PlanRequest& request, Communicator& comm, bool prove = true) {
  AttentionCall call;
  call.request = request;
  call.comm = &comm;
  call.prove = prove;
  const int64_t n = query_layout(request).count(comm.rank());
  const at::Tensor q = at::ones({request.shape.batch, n, request.shape.heads, 4});
  const at::Tensor k = at::ones({request.shape.batch, n, request.shape.kv_heads, 4});
  const int64_t before = comm.stats().messages_sent;
  AttentionStats stats;
  attention_forward(q, k, k, call, &stats);
  return comm.stats().messages_sent - before - stats.messages_sent;
}

TEST(Proof, FirstCallProvesAndLaterCallsSendNothingMore) {
  const PlanRequest request = causal_zigzag(3, 36), other = causal_zigzag(3, 48);
  run_ranks(3, [&](Communicator& comm) {
    const int64_t without = messages_of(request, comm, false);
    EXPECT_GE(messages_of(request, comm), without + 3) << "a digest to every rank";
    EXPECT_EQ(messages_of(request, comm), without);
    EXPECT_GE(messages_of(other, comm), without + 3);
    EXPECT_EQ(messages_of(request, comm), without);
    EXPECT_EQ(messages_of(other, comm), without);
  });
}

TEST(Proof, AllRanksProveAgainIfOneHasLostItsProof) {
  const PlanRequest request = causal_zigzag(3, 60);
  run_ranks(3, [&](Communicator& comm) {
    const int64_t without = messages_of(request, comm, false);
    messages_of(request, comm);
    const auto plan = cached_plan(request, comm.rank());
    EXPECT_TRUE(plan->proved);
    if (comm.rank() == 1) plan->proved = false;
    EXPECT_GE(messages_of(request, comm), without + 3);
    EXPECT_EQ(messages_of(request, comm), without);
  });
}

TEST(Proof, EveryCallProvesIfNothingIsCached) {
  const int64_t total = cache_total();
  set_cache_total(0);
  run_ranks(2, [&](Communicator& comm) {
    const int64_t without = messages_of(causal_zigzag(2, 20), comm, false);
    EXPECT_GE(messages_of(causal_zigzag(2, 20), comm), without + 2);
    EXPECT_GE(messages_of(causal_zigzag(2, 20), comm), without + 2);
  });
  set_cache_total(total);
}

TEST(Proof, RanksMustAgreeOnLeavingItOut) {
  expect_refused_everywhere([](Communicator& comm) { messages_of(causal_zigzag(3, 24), comm, comm.rank() != 1); },
                            ErrorKind::kMismatch, "proof of the plan");
}

TEST(Proof, PlanAheadMakesTheShareOfTheProof) {
  const PlanRequest request = causal_zigzag(1, 44);
  const PlanStats before = plan_stats();
  plan_ahead(causal_zigzag(1, 43), 0, /*prove=*/false);
  plan_ahead(request, 0, /*prove=*/true);
  // By the thread that plans. Bounded, because it keeps its errors for the call that will need the plan.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (plan_stats().shares_made == before.shares_made && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(plan_stats().programs_made, before.programs_made + 2);
  EXPECT_TRUE(cached_plan(request, 0)->share().proof.holds());
  EXPECT_EQ(plan_stats().shares_made, before.shares_made + 1);
  EXPECT_EQ(plan_stats().programs_made, before.programs_made + 2);
}

TEST(Proof, EveryCallProvesAnAdaptivePlan) {
  PlanRequest request = causal_zigzag(2, 64);
  request.pattern =
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "pattern");
  request.layout = LayoutKind::kContiguous;
  run_ranks(2, [&](Communicator& comm) {
    const int64_t without = messages_of(request, comm, false);
    EXPECT_GE(messages_of(request, comm), without + 2);
    EXPECT_GE(messages_of(request, comm), without + 2);
  });
}

// Proves the plan of a request ahead of its calls.
void prove_ahead(const PlanRequest& request, Communicator& comm) {
  AttentionCall call;
  call.request = request;
  call.comm = &comm;
  plan_calls({call}, {at::kFloat, 4, at::kCPU}, {"planning", 0});
}

TEST(Proof, PlanCallsServesLaterCalls) {
  const PlanRequest request = causal_zigzag(3, 72);
  run_ranks(3, [&](Communicator& comm) {
    prove_ahead(request, comm);
    EXPECT_EQ(messages_of(request, comm), messages_of(request, comm, false));
  });
}

TEST(Proof, PlanCallsProvesAgainIfOneRankHasLostItsProof) {
  const PlanRequest request = causal_zigzag(3, 84);
  run_ranks(3, [&](Communicator& comm) {
    prove_ahead(request, comm);
    const auto plan = cached_plan(request, comm.rank());
    if (comm.rank() == 1) plan->proved = false;
    const int64_t before = comm.stats().messages_sent;
    prove_ahead(request, comm);
    EXPECT_TRUE(plan->proved);
    EXPECT_EQ(comm.stats().messages_sent, before + 3) << "a digest to every rank";
    prove_ahead(request, comm);
    EXPECT_EQ(comm.stats().messages_sent, before + 3);
  });
}

TEST(Proof, PlanningErrorOfOneRankIsRaisedByAll) {
  const PlanRequest request = causal_zigzag(3, 96);
  PlanRequest odd = request;
  odd.shape.heads = 3, odd.shape.kv_heads = 2;
  expect_refused_everywhere([&](Communicator& comm) { prove_ahead(comm.rank() == 1 ? odd : request, comm); },
                            ErrorKind::kPlan, "3 query heads cannot share 2 kv heads");
}

TEST(PlannedCall, KeepsTheCommunicatorUntilTheBackward) {
  AttentionCall call;
  call.request = causal_zigzag(1, 8);
  std::shared_ptr<Communicator> comm = make_self_communicator();
  const std::weak_ptr<Communicator> watched = comm;
  call.comm = comm.get();
  const at::Tensor q = at::randn({1, 8, 2, 4}).requires_grad_(), k = at::randn({1, 8, 1, 4}).requires_grad_();
  {
    const at::Tensor out = attention(q, k, k, call);
    comm.reset();
    EXPECT_FALSE(watched.expired());
    out.sum().backward();
  }
  EXPECT_TRUE(k.grad().defined());
  EXPECT_TRUE(watched.expired());
}

}  // namespace
}  // namespace annulus::prove_test
