// Tests that a request is planned once for all that is made of it, that ranks which plan calls together make one
// agreement for all of them, with the same results, and what happens if the ranks differ.
#include "attention/execution/planned_call.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/plans.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::planned_call_test {
namespace {

using testing::causal_zigzag;
using testing::expect_refused_everywhere;

using Calls = std::vector<AttentionCall>;

Calls calls_of(Communicator& comm, const std::vector<int64_t>& lengths, bool prove) {
  Calls calls;
  for (size_t i = 0; i < lengths.size(); ++i) {
    AttentionCall call;
    call.request = causal_zigzag(comm.size(), lengths[i]);
    call.comm = &comm;
    call.label = "layer " + std::to_string(i);
    call.prove = prove;
    calls.push_back(call);
  }
  return calls;
}

constexpr int64_t kDim = 4;
constexpr TensorTraits kTensors{at::kDouble, kDim, at::kCPU};

std::vector<PlannedCall> plan(const Calls& calls, const TensorTraits& tensors = kTensors) {
  std::vector<PlannedCall> planned(calls.begin(), calls.end());
  plan_calls(planned, tensors, {"planning", 0});
  return planned;
}

struct Tensors {
  explicit Tensors(const PlannedCall& planned) {
    const AttentionCall& call = planned.settings();
    const int64_t n = query_layout(call.request).count(call.comm->rank());
    q = at::randn({1, n, 2, kDim}, at::kDouble);
    k = at::randn({1, n, 1, kDim}, at::kDouble);
    v = at::randn({1, n, 1, kDim}, at::kDouble);
  }
  at::Tensor q, k, v;
};

// The collectives of all calls, forward and backward, on the communicator.
int64_t collectives_of(const std::vector<PlannedCall>& calls) {
  const Communicator& comm = *calls.front().settings().comm;
  const int64_t before = comm.stats().collectives;
  for (const PlannedCall& call : calls) {
    const Tensors t(call);
    attention_backward(t.q, t.q, t.k, t.v, attention_forward(t.q, t.k, t.v, call));
  }
  return comm.stats().collectives - before;
}

TEST(PlannedCalls, MakeOneAgreementForAll) {
  run_ranks(3, [](Communicator& comm) {
    const Calls calls = calls_of(comm, {24, 24, 36, 24}, /*prove=*/false);
    EXPECT_EQ(collectives_of({calls.begin(), calls.end()}), 2 * 4);
    const int64_t before = comm.stats().collectives;
    const std::vector<PlannedCall> planned = plan(calls);
    EXPECT_EQ(comm.stats().collectives - before, 1);
    EXPECT_EQ(collectives_of(planned), 0);
  });
}

// Two ranks may write one pattern in two ways. Each must prove as many plans as the other.
TEST(PlannedCalls, OnePatternWrittenInTwoWaysIsOnePlan) {
  run_ranks(2, [](Communicator& comm) {
    comm.set_timeout(Seconds(20));
    Calls calls = calls_of(comm, {32, 32}, /*prove=*/true);
    if (comm.rank() == 0) {
      calls[1].request.pattern.kind = PatternSpec::Kind::kWindow;
      calls[1].request.pattern.left = PatternSpec::kOpen;
    }
    const std::vector<PlannedCall> planned = plan(calls);
    EXPECT_TRUE(planned[0].plan()->proved && planned[1].plan()->proved);
    EXPECT_EQ(collectives_of(planned), 0);
  });
}

TEST(PlannedCalls, HaveTheSameResults) {
  run_ranks(3, [](Communicator& comm) {
    const Calls calls = calls_of(comm, {24}, /*prove=*/false);
    const Tensors t(calls[0]);
    const AttentionOutput a = attention_forward(t.q, t.k, t.v, plan(calls)[0]),
                          b = attention_forward(t.q, t.k, t.v, calls[0]);
    EXPECT_TRUE(at::equal(a.out, b.out));
    EXPECT_TRUE(at::equal(attention_backward(t.q, t.q, t.k, t.v, a).dk, attention_backward(t.q, t.q, t.k, t.v, b).dk));
  });
}

// The agreement is the same decision on all ranks, whatever each of them remembers of earlier proofs.
TEST(PlannedCalls, AreProvedIfOneRankAsks) {
  const std::vector<int64_t> lengths = {48, 60, 48};
  run_ranks(3, [&](Communicator& comm) {
    const Calls calls = calls_of(comm, lengths, /*prove=*/true);
    const auto proved = [&](size_t call) -> std::atomic<bool>& {
      return cached_plan(calls[call].request, comm.rank())->proved;
    };
    plan(calls);
    for (size_t i = 0; i < calls.size(); ++i) EXPECT_TRUE(proved(i));
    comm.barrier({"all have looked", 0});
    if (comm.rank() == 1) proved(1) = false;
    comm.barrier({"rank 1 has forgotten", 0});
    plan(calls);
    EXPECT_TRUE(proved(1));
    const int64_t before = comm.stats().collectives;
    const std::vector<PlannedCall> planned = plan(calls);
    EXPECT_EQ(comm.stats().collectives - before, 1) << "a proof is made once";
    EXPECT_EQ(collectives_of(planned), 0);
  });
}

TEST(PlannedCalls, DifferencesAreRaisedOnEveryRank) {
  const auto differ = [](const std::function<void(Communicator&, Calls&, TensorTraits&)>& change, ErrorKind kind,
                         const std::string& part) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          Calls calls = calls_of(comm, {24, 24}, /*prove=*/false);
          TensorTraits tensors = kTensors;
          if (comm.rank() == 2) change(comm, calls, tensors);
          plan(calls, tensors);
        },
        kind, part);
  };
  differ([](Communicator&, Calls& calls, TensorTraits&) { calls[1].request.pattern.causal = false; },
         ErrorKind::kMismatch, "call 2, plan");
  differ([](Communicator&, Calls& calls, TensorTraits&) { calls.pop_back(); }, ErrorKind::kMismatch, "call 2, call");
  differ([](Communicator&, Calls&, TensorTraits& tensors) { tensors.dtype = at::kFloat; }, ErrorKind::kMismatch,
         "dtype");
  // A plan that one rank cannot make.
  differ([](Communicator&, Calls& calls, TensorTraits&) { calls[0].request.ranks = 4; }, ErrorKind::kPlan,
         "expected a communicator of the plan's 4 ranks");
  differ([](Communicator&, Calls& calls, TensorTraits&) { calls[1].request.shape.k_len = -1; }, ErrorKind::kPlan, "");
}

TEST(PlannedCalls, AreOverOneCommunicator) {
  run_ranks(2, [](Communicator& comm) {
    const std::shared_ptr<Communicator> other = comm.split(0, comm.rank());
    Calls calls = calls_of(comm, {24, 24}, /*prove=*/false);
    calls[1].comm = other.get();
    EXPECT_THROW(plan(calls), Error);
  });
}

// Only this rank can notice, because it makes no agreement.
TEST(PlannedCalls, TensorsThatWereNotAgreedOnAreRefused) {
  std::atomic<int> refused = 0;
  run_ranks(2, [&](Communicator& comm) {
    const std::vector<PlannedCall> calls = plan(calls_of(comm, {24, 24}, /*prove=*/false));
    const auto refusal = [&](const std::function<at::Tensor(const at::Tensor&)>& changed) {
      const Tensors t(calls[0]);
      try {
        attention_forward(changed(t.q), changed(t.k), changed(t.v), calls[0]);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kPlan);
        EXPECT_NE(std::string(e.what()).find("the ranks have agreed ahead on tensors of another dtype"),
                  std::string::npos)
            << e.what();
        ++refused;
      }
    };
    refusal([](const at::Tensor& t) { return t.to(at::kFloat); });
    refusal([](const at::Tensor& t) { return t.narrow(3, 0, kDim - 1).contiguous(); });
    EXPECT_EQ(collectives_of(calls), 0);
  });
  EXPECT_EQ(refused, 4);
}

// What was agreed on is the call itself: a copy with another label is another call, on which the ranks agree as it is
// made.
TEST(PlannedCalls, AChangedCallMakesItsOwnAgreement) {
  run_ranks(2, [&](Communicator& comm) {
    const std::vector<PlannedCall> calls = plan(calls_of(comm, {24}, /*prove=*/false));
    AttentionCall other = calls[0].settings();
    other.label = "layer 7";
    EXPECT_EQ(collectives_of({other}), 2);
  });
}

int64_t lookups() {
  const CacheStats programs = plan_stats().programs;
  return programs.hits + programs.misses;
}

// A request is resolved once: each different request of calls that are planned together is looked up in the cache of
// plans once, and never again in their forwards and backwards. A call that is not planned ahead is looked up by its
// first forward, and then keeps its plan.
TEST(PlannedCalls, ARequestIsLookedUpOnce) {
  run_ranks(1, [](Communicator& comm) {
    const Calls calls = calls_of(comm, {40, 40, 52, 40}, /*prove=*/true);
    int64_t before = lookups();
    const std::vector<PlannedCall> planned = plan(calls);
    EXPECT_EQ(lookups() - before, 2);
    before = lookups();
    collectives_of(planned);
    collectives_of(planned);
    plan_calls(planned, kTensors, {"planning again", 0});
    EXPECT_EQ(lookups(), before);

    const std::vector<PlannedCall> kept(calls.begin(), calls.begin() + 1);
    collectives_of(kept);
    collectives_of(kept);
    EXPECT_EQ(lookups(), before + 1);
    collectives_of({calls[0]});
    EXPECT_EQ(lookups(), before + 2) << "only the forward looks up an AttentionCall";
  });
}

// Ranks compare digests and fetch texts only if these differ, so each thing that must be alike must be in the digest:
// of calls that are planned together, and of a forward and a backward by themselves.
TEST(PlannedCalls, EachThingThatMustBeAlikeIsCompared) {
  struct Case {
    std::string field;
    std::function<void(AttentionCall&)> change;
  };
  const auto dropout = [](auto change) { return Case{"dropout", [change](AttentionCall& c) { change(c.dropout); }}; };
  const auto plan_of = [](auto change) { return Case{"plan", [change](AttentionCall& c) { change(c.request); }}; };
  const Case cases[] = {
      {"proof of the plan", [](AttentionCall& c) { c.prove = true; }},
      {"scale", [](AttentionCall& c) { c.scale = std::nextafter(0.5, 1); }},
      {"kernel", [](AttentionCall& c) { c.kernel = KernelKind::kReference; }},
      dropout([](Dropout& d) { d.rate = 0.25; }),
      dropout([](Dropout& d) { d.rate = 0; }),
      dropout([](Dropout& d) { ++d.seed; }),
      dropout([](Dropout& d) { ++d.step; }),
      dropout([](Dropout& d) { ++d.layer; }),
      dropout([](Dropout& d) { ++d.first_row; }),
      plan_of([](PlanRequest& r) { r.layout = LayoutKind::kStriped; }),
      plan_of([](PlanRequest& r) { r.schedule = ScheduleKind::kAllGather; }),
      plan_of([](PlanRequest& r) { r.keep_last = false; }),
      plan_of([](PlanRequest& r) { r.shape.query_offset = 1; }),
      plan_of([](PlanRequest& r) { r.pattern.causal = false; }),
      plan_of([](PlanRequest& r) {
        r.pattern.documents = {{10, 14}};
      }),
      plan_of([](PlanRequest& r) {
        r.pattern.documents = {{14, 10}};
      }),
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    const auto call_of = [&](Communicator& comm, bool changes) {
      AttentionCall call = calls_of(comm, {24}, /*prove=*/false)[0];
      call.scale = 0.5;
      call.dropout = {.rate = 0.5, .seed = 3, .step = 4, .layer = 5, .first_row = 6};
      if (changes && comm.rank() == 1) cases[i].change(call);
      return call;
    };
    const std::string part = cases[i].field + " is ";
    SCOPED_TRACE(std::to_string(i) + ": " + part);
    expect_refused_everywhere([&](Communicator& comm) { plan({call_of(comm, true)}); }, ErrorKind::kMismatch,
                              "call 1, " + part);
    expect_refused_everywhere([&](Communicator& comm) { collectives_of({call_of(comm, true)}); }, ErrorKind::kMismatch,
                              part);
    if (cases[i].field == "plan") continue;  // the forward's tensors may not fit another plan
    expect_refused_everywhere(
        [&](Communicator& comm) {
          const Tensors t(call_of(comm, false));
          AttentionOutput out = attention_forward(t.q, t.k, t.v, call_of(comm, false));
          out.call = call_of(comm, true);
          attention_backward(t.q, t.q, t.k, t.v, out);
        },
        ErrorKind::kMismatch, part);
  }
}

TEST(PlannedCalls, AForwardIsNoBackward) {
  expect_refused_everywhere(
      [](Communicator& comm) {
        const AttentionCall call = calls_of(comm, {24}, /*prove=*/false)[0];
        const Tensors t(call);
        AttentionOutput out = attention_forward(t.q, t.k, t.v, call);
        out.number = 0;
        if (comm.rank() == 1) {
          attention_backward(t.q, t.q, t.k, t.v, out);
        } else {
          attention_forward(t.q, t.k, t.v, call);
        }
      },
      ErrorKind::kMismatch, "direction is ");
}

}  // namespace
}  // namespace annulus::planned_call_test
