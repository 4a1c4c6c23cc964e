// Tests of the proof that ranks make together, and of when attention requires it.
#include "attention/execution/prove.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/proof/proofs.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "memory/caches.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/attention/plan/planted_mistakes.h"

namespace annulus::prove_test {
namespace {

using testing::expect_refused_everywhere;
using testing::Mistake;
using testing::planted_mistakes;

class PlantedMistakeOverRanks : public ::testing::TestWithParam<Mistake> {};

TEST_P(PlantedMistakeOverRanks, IsRaisedOnEveryRank) {
  std::vector<Program> programs = testing::programs_of(GetParam().request);
  const std::shared_ptr<const Pattern> pattern = cached_pattern(programs[0].request);
  const auto prove = [&](Communicator& comm) {
    const Program& own = programs[static_cast<size_t>(comm.rank())];
    prove_together(prove_share(own, *pattern), own.request, comm);
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
      EXPECT_NE(std::string(error.what()).find("rank "), std::string::npos) << error.what();
      ++raised;
    }
  });
  EXPECT_EQ(raised, GetParam().request.ranks);
}

INSTANTIATE_TEST_SUITE_P(Each, PlantedMistakeOverRanks, ::testing::ValuesIn(planted_mistakes()),
                         [](const auto& info) { return info.param.name; });

PlanRequest zigzag(int ranks, int64_t length) {
  PlanRequest request;
  request.shape = {1, 2, 1, length, length, 0};
  request.pattern.causal = true;
  request.layout = LayoutKind::kZigzag;
  request.ranks = ranks;
  return request;
}

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
  const PlanRequest request = zigzag(3, 36), other = zigzag(3, 48);
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
  const PlanRequest request = zigzag(3, 60);
  run_ranks(3, [&](Communicator& comm) {
    const int64_t without = messages_of(request, comm, false);
    messages_of(request, comm);
    const auto share = cached_share(request, *cached_program(request, comm.rank()));
    EXPECT_TRUE(*share->shown);
    if (comm.rank() == 1) *share->shown = false;
    EXPECT_GE(messages_of(request, comm), without + 3);
    EXPECT_EQ(messages_of(request, comm), without);
  });
}

TEST(Proof, EveryCallProvesIfNothingIsCached) {
  const int64_t total = cache_total();
  set_cache_total(0);
  run_ranks(2, [&](Communicator& comm) {
    const int64_t without = messages_of(zigzag(2, 20), comm, false);
    EXPECT_GE(messages_of(zigzag(2, 20), comm), without + 2);
    EXPECT_GE(messages_of(zigzag(2, 20), comm), without + 2);
  });
  set_cache_total(total);
}

TEST(Proof, RanksMustAgreeOnLeavingItOut) {
  expect_refused_everywhere([](Communicator& comm) { messages_of(zigzag(3, 24), comm, comm.rank() != 1); },
                            ErrorKind::kMismatch, "proof of the plan");
}

TEST(Proof, PlanAndProveAheadCachesTheProof) {
  const PlanRequest request = zigzag(1, 44);
  const auto proofs = [] {
    for (const CacheReport& report : cache_reports()) {
      if (report.name == "proofs") return report.stats;
    }
    return CacheStats{};
  };
  const int64_t before = proofs().misses;
  plan_and_prove_ahead(request, 0);
  // One thread makes all plans in turn, so that the first plan is complete when the second one is.
  std::promise<void> made;
  plan_ahead(zigzag(1, 45), 0, [&](const Program&) { made.set_value(); });
  made.get_future().wait();
  EXPECT_EQ(proofs().misses, before + 1);
  EXPECT_TRUE(cached_share(request, *cached_program(request, 0))->proof.holds());
  EXPECT_EQ(proofs().misses, before + 1);
}

TEST(Proof, EveryCallProvesAnAdaptivePlan) {
  PlanRequest request = zigzag(2, 64);
  request.pattern =
      parse_pattern("{ kind = 'blocks', map = 'adaptive', block = 16, keep = 2, causal = true }", "pattern");
  request.layout = LayoutKind::kContiguous;
  run_ranks(2, [&](Communicator& comm) {
    const int64_t without = messages_of(request, comm, false);
    EXPECT_GE(messages_of(request, comm), without + 2);
    EXPECT_GE(messages_of(request, comm), without + 2);
  });
}

TEST(Proof, ProvePlanServesLaterCalls) {
  const PlanRequest request = zigzag(3, 72);
  run_ranks(3, [&](Communicator& comm) {
    prove_plan(request, comm);
    EXPECT_EQ(messages_of(request, comm), messages_of(request, comm, false));
  });
}

TEST(Proof, ProvePlanRunsAgainIfOneRankHasLostItsProof) {
  const PlanRequest request = zigzag(3, 84);
  run_ranks(3, [&](Communicator& comm) {
    prove_plan(request, comm);
    const auto share = cached_share(request, *cached_program(request, comm.rank()));
    if (comm.rank() == 1) *share->shown = false;
    const int64_t before = comm.stats().messages_sent;
    prove_plan(request, comm);
    EXPECT_TRUE(*share->shown);
    EXPECT_EQ(comm.stats().messages_sent, before + 3) << "a digest to every rank";
    prove_plan(request, comm);
    EXPECT_EQ(comm.stats().messages_sent, before + 3);
  });
}

TEST(Proof, PlanningErrorOfOneRankIsRaisedByAll) {
  const PlanRequest request = zigzag(3, 96);
  PlanRequest odd = request;
  odd.shape.heads = 3, odd.shape.kv_heads = 2;
  expect_refused_everywhere([&](Communicator& comm) { prove_plan(comm.rank() == 1 ? odd : request, comm); },
                            ErrorKind::kPlan, "3 query heads cannot share 2 kv heads");
}

TEST(KeptCall, KeepsTheCommunicatorUntilTheBackward) {
  AttentionCall call;
  call.request = zigzag(1, 8);
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
