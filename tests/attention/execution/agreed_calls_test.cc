// Tests that ranks which agree ahead make one agreement for all calls, with the same results, and what happens if they
// differ.
#include "attention/execution/agreed_calls.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <vector>

#include "attention/execution/attention.h"
#include "attention/plan/plan.h"
#include "attention/proof/proofs.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::agreed_calls_test {
namespace {

using testing::expect_refused_everywhere;

PlanRequest request_of(int ranks, int64_t length) {
  PlanRequest request;
  request.shape = {1, 2, 1, length, length, 0};
  request.pattern.causal = true;
  request.layout = LayoutKind::kZigzag;
  request.ranks = ranks;
  return request;
}

std::vector<AttentionCall> calls_of(Communicator& comm, const std::vector<int64_t>& lengths, bool prove) {
  std::vector<AttentionCall> calls;
  for (size_t i = 0; i < lengths.size(); ++i) {
    AttentionCall call;
    call.request = request_of(comm.size(), lengths[i]);
    call.comm = &comm;
    call.label = "layer " + std::to_string(i);
    call.prove = prove;
    calls.push_back(call);
  }
  return calls;
}

constexpr int64_t kDim = 4;
constexpr TensorTraits kTensors{at::kDouble, kDim, at::kCPU};

void agree(std::vector<AttentionCall>& calls, const TensorTraits& tensors = kTensors) {
  std::vector<AttentionCall*> all;
  for (AttentionCall& call : calls) all.push_back(&call);
  agree_ahead(all, tensors, {"agreeing", 0});
}

struct Tensors {
  explicit Tensors(const AttentionCall& call) {
    const int64_t n = query_layout(call.request).count(call.comm->rank());
    q = at::randn({1, n, 2, kDim}, at::kDouble);
    k = at::randn({1, n, 1, kDim}, at::kDouble);
    v = at::randn({1, n, 1, kDim}, at::kDouble);
  }
  at::Tensor q, k, v;
};

// The collectives of all calls, forward and backward, on the communicator.
int64_t collectives_of(std::vector<AttentionCall>& calls) {
  const Communicator& comm = *calls.front().comm;
  const int64_t before = comm.stats().collectives;
  for (const AttentionCall& call : calls) {
    const Tensors t(call);
    const AttentionOutput out = attention_forward(t.q, t.k, t.v, call);
    attention_backward(t.q, t.q, t.k, t.v, out, call);
  }
  return comm.stats().collectives - before;
}

TEST(AgreedCalls, MakeOneAgreementForAll) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<AttentionCall> calls = calls_of(comm, {24, 24, 36, 24}, /*prove=*/false);
    EXPECT_EQ(collectives_of(calls), 2 * 4);
    const int64_t before = comm.stats().collectives;
    agree(calls);
    EXPECT_EQ(comm.stats().collectives - before, 1);
    EXPECT_EQ(collectives_of(calls), 0);
  });
}

TEST(AgreedCalls, HaveTheSameResults) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<AttentionCall> calls = calls_of(comm, {24}, /*prove=*/false), alone = calls;
    agree(calls);
    const Tensors t(calls[0]);
    const AttentionOutput a = attention_forward(t.q, t.k, t.v, calls[0]),
                          b = attention_forward(t.q, t.k, t.v, alone[0]);
    EXPECT_TRUE(at::equal(a.out, b.out));
    EXPECT_TRUE(at::equal(attention_backward(t.q, t.q, t.k, t.v, a, calls[0]).dk,
                          attention_backward(t.q, t.q, t.k, t.v, b, alone[0]).dk));
  });
}

// The agreement is the same decision on all ranks, whatever each of them remembers of earlier proofs.
TEST(AgreedCalls, AreProvedIfOneRankAsks) {
  const std::vector<int64_t> lengths = {48, 60, 48};
  const auto shown = [](const AttentionCall& call) -> bool {
    return cached_share(call.request, *cached_program(call.request, call.comm->rank()))->shown->load();
  };
  run_ranks(3, [&](Communicator& comm) {
    std::vector<AttentionCall> calls = calls_of(comm, lengths, /*prove=*/true);
    agree(calls);
    for (const AttentionCall& call : calls) EXPECT_TRUE(shown(call));
    comm.barrier({"all have looked", 0});
    if (comm.rank() == 1) {
      *cached_share(calls[1].request, *cached_program(calls[1].request, comm.rank()))->shown = false;
    }
    comm.barrier({"rank 1 has forgotten", 0});
    agree(calls);
    EXPECT_TRUE(shown(calls[1]));
    const int64_t before = comm.stats().collectives;
    agree(calls);
    EXPECT_EQ(comm.stats().collectives - before, 1) << "a proof is made once";
    EXPECT_EQ(collectives_of(calls), 0);
  });
}

TEST(AgreedCalls, DifferencesAreRaisedOnEveryRank) {
  const auto differ = [](const std::function<void(Communicator&, std::vector<AttentionCall>&, TensorTraits&)>& change,
                         ErrorKind kind, const std::string& part) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          std::vector<AttentionCall> calls = calls_of(comm, {24, 24}, /*prove=*/false);
          TensorTraits tensors = kTensors;
          if (comm.rank() == 2) change(comm, calls, tensors);
          agree(calls, tensors);
        },
        kind, part);
  };
  using Calls = std::vector<AttentionCall>;
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

TEST(AgreedCalls, AreOverOneCommunicator) {
  run_ranks(2, [](Communicator& comm) {
    const std::shared_ptr<Communicator> other = comm.split(0, comm.rank());
    std::vector<AttentionCall> calls = calls_of(comm, {24, 24}, /*prove=*/false);
    calls[1].comm = other.get();
    EXPECT_THROW(agree(calls), Error);
  });
}

// Only this rank can notice, because it makes no agreement.
TEST(AgreedCalls, ACallThatWasNotAgreedOnIsRefused) {
  std::atomic<int> refused = 0;
  run_ranks(2, [&](Communicator& comm) {
    std::vector<AttentionCall> calls = calls_of(comm, {24, 24}, /*prove=*/false);
    agree(calls);
    AttentionCall other = calls[0];
    other.label = "layer 7";
    const auto refusal = [&](const AttentionCall& call, at::ScalarType dtype) {
      const Tensors t(call);
      try {
        attention_forward(t.q.to(dtype), t.k.to(dtype), t.v.to(dtype), call);
        ADD_FAILURE() << "no error";
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::kPlan);
        EXPECT_NE(std::string(e.what()).find("the ranks have agreed ahead on other calls"), std::string::npos)
            << e.what();
        ++refused;
      }
    };
    refusal(other, at::kDouble);
    refusal(calls[0], at::kFloat);
    EXPECT_EQ(collectives_of(calls), 0);
  });
  EXPECT_EQ(refused, 4);
}

}  // namespace
}  // namespace annulus::agreed_calls_test
