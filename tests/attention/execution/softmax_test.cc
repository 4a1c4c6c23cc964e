// Tests of attention with sinks (attention/execution/sinks.h) and soft caps of scores over many ranks, against the fp64
// oracle, forward and backward; of extreme sinks; of gradients by differences; and of what ranks must agree on.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/execution/sinks.h"
#include "attention/oracle/oracle.h"
#include "attention/plan/plan.h"
#include "attention/testing/any_request.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/common/exactness.h"

namespace annulus::softmax_test {
namespace {

using testing::agrees;
using testing::as_exact;
using testing::causal_zigzag;
using testing::expect_refused_everywhere;
using testing::Expected;
using testing::expected_of;
using testing::Inputs;
using testing::oracle_of;
using testing::random_inputs;
using testing::run_everywhere;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

KernelKind any_kernel() { return *rc::gen::element(KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference); }

OracleSoftmax any_softmax(int64_t heads, at::ScalarType type) {
  OracleSoftmax softmax{.softcap = *rc::gen::element(0.0, 0.8, 20.0)};
  if (*rc::gen::arbitrary<bool>()) softmax.sinks = at::randn({heads}, at::kDouble).to(type) * 2;
  RC_LOG() << "soft cap " << softmax.softcap << ", sinks "
           << (softmax.sinks.defined() ? softmax.sinks.toString() : "none") << "\n";
  return softmax;
}

void assert_exact(const OracleResult& got, const Expected& want, at::ScalarType type) {
  const ::testing::AssertionResult result = as_exact(got, want, type);
  RC_LOG() << result.message();
  RC_ASSERT(static_cast<bool>(result));
}

// Any pattern, layout, schedule and number of ranks.
RC_GTEST_PROP(Softmax, SinksAndCapsEqualTheOracle, ()) {
  const PlanRequest request = testing::any_request();
  const OracleSoftmax softmax = any_softmax(request.shape.heads, at::kDouble);
  RC_LOG() << request.text() << "\n";
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  assert_exact(run_everywhere(request, in, any_kernel(), {}, {}, {}, softmax).result,
               expected_of(request, in, {}, softmax), at::kDouble);
}

RC_GTEST_PROP(Softmax, NarrowDtypesAreAsExactAsAPlainChain, ()) {
  const PlanRequest request = testing::any_request();
  const OracleSoftmax softmax = any_softmax(request.shape.heads, at::kFloat);
  const at::ScalarType type = *rc::gen::element(at::kFloat, at::kBFloat16, at::kHalf);
  RC_LOG() << request.text() << " " << toString(type) << "\n";
  const Inputs in = random_inputs(request.shape, 8, type);
  assert_exact(run_everywhere(request, in, any_kernel(), {}, {}, {}, softmax).result,
               expected_of(request, in, {}, softmax), type);
}

// A sink's probability takes part in dropout's derivative, but is not dropped itself.
RC_GTEST_PROP(Softmax, DropoutEqualsTheOracle, ()) {
  const PlanRequest request = testing::any_request();
  const OracleSoftmax softmax = any_softmax(request.shape.heads, at::kDouble);
  const Dropout dropout{.rate = 0.3, .seed = 7, .step = 1, .layer = 2, .first_row = 3};
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const OracleResult got = run_everywhere(request, in, any_kernel(), {}, {}, dropout, softmax).result;
  const OracleResult want = oracle_of(request, in, {}, dropout, softmax);
  for (at::Tensor OracleResult::*const result : {&OracleResult::out, &OracleResult::lse, &OracleResult::dq,
                                                 &OracleResult::dk, &OracleResult::dv, &OracleResult::dsinks}) {
    if (!(want.*result).defined()) continue;
    // More than the magnitudes that are added up to any result here, as in drawn_test.cc.
    const ::testing::AssertionResult exact = agrees(got.*result, want.*result, 1000);
    RC_LOG() << exact.message() << "\n";
    RC_ASSERT(static_cast<bool>(exact));
  }
}

TEST(Softmax, ExtremeSinks) {
  const PlanRequest request = causal_zigzag(3, 48);
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const auto with = [&](const std::vector<double>& sinks) {
    OracleSoftmax softmax;
    softmax.sinks = at::zeros({2}, at::kDouble);
    for (int64_t h = 0; h < 2; ++h) softmax.sinks.select(0, h).fill_(sinks[static_cast<size_t>(h)]);
    const OracleResult got = run_everywhere(request, in, KernelKind::kAuto, {}, {}, {}, softmax).result;
    EXPECT_TRUE(as_exact(got, expected_of(request, in, {}, softmax), at::kDouble)) << sinks[0] << " " << sinks[1];
    return got;
  };
  // -inf is no sink, exactly.
  const OracleResult none = run_everywhere(request, in, KernelKind::kAuto).result;
  const OracleResult minus = with({-kInfinity, -kInfinity});
  EXPECT_TRUE(minus.out.equal(none.out) && minus.lse.equal(none.lse) && minus.dq.equal(none.dq));
  EXPECT_TRUE(minus.dk.equal(none.dk) && minus.dv.equal(none.dv));
  EXPECT_TRUE(minus.dsinks.eq(0).all().item<bool>());
  // A sink far above all scores takes all of the softmax; one far below takes nothing.
  const OracleResult large = with({1e4, -1e4});
  EXPECT_TRUE(large.out.select(2, 0).eq(0).all().item<bool>());
  EXPECT_TRUE(large.out.select(2, 1).equal(none.out.select(2, 1)));
  // One that is equal to the largest score of all.
  const at::Tensor scores = in.q.transpose(1, 2).matmul(in.k.permute({0, 2, 3, 1})) / std::sqrt(8.0);
  with({scores.max().item<double>(), 0});
}

// With scores near -120 or 1e4, where exponentials of them by themselves underflow or overflow.
TEST(Softmax, SinksBesideHugeAndTinyScores) {
  for (const double shift : {-120.0, 1e4}) {
    const PlanRequest request = causal_zigzag(2, 32);
    const Inputs in = random_inputs(request.shape, 8, at::kDouble);
    in.q.select(3, 0).fill_(1);
    in.k.select(3, 0).fill_(shift);
    OracleSoftmax softmax;
    softmax.sinks = at::full({2}, shift + 1, at::kDouble);
    EXPECT_TRUE(as_exact(run_everywhere(request, in, KernelKind::kAuto, 1.0, {}, {}, softmax).result,
                         expected_of(request, in, 1.0, softmax), at::kDouble))
        << shift;
  }
}

TEST(Softmax, RowsWithoutKeysSeeTheSinkAlone) {
  for (const KernelKind kernel : {KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference}) {
    PlanRequest request = causal_zigzag(4, 64);
    request.shape.query_offset = -20;  // the first 20 queries come before every key
    const Inputs in = random_inputs(request.shape, 8, at::kFloat);
    OracleSoftmax softmax;
    softmax.sinks = at::randn({2}, at::kFloat);
    const OracleResult got = run_everywhere(request, in, kernel, {}, {}, {}, softmax).result;
    EXPECT_TRUE(as_exact(got, expected_of(request, in, {}, softmax), at::kFloat)) << to_string(kernel);
    EXPECT_TRUE(got.out.narrow(1, 0, 20).eq(0).all().item<bool>());
    EXPECT_TRUE(got.lse.narrow(2, 0, 20).eq(softmax.sinks.view({1, 2, 1})).all().item<bool>());
    EXPECT_TRUE(got.dq.narrow(1, 0, 20).eq(0).all().item<bool>());
    // With no other rows the gradient of the sinks is 0.
    request.shape.query_offset = -64;
    const OracleResult nothing = run_everywhere(request, in, kernel, {}, {}, {}, softmax).result;
    EXPECT_TRUE(nothing.dsinks.eq(0).all().item<bool>()) << nothing.dsinks;
  }
}

TEST(Softmax, RowsWithoutKeysAndSinksGiveNoNan) {
  PlanRequest request = causal_zigzag(2, 32);
  request.shape.query_offset = -9;
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  OracleSoftmax softmax;
  softmax.sinks = at::full({2}, -kInfinity, at::kDouble);
  const OracleResult got = run_everywhere(request, in, KernelKind::kAuto, {}, {}, {}, softmax).result;
  EXPECT_TRUE(as_exact(got, expected_of(request, in), at::kDouble));
  EXPECT_TRUE(got.dsinks.eq(0).all().item<bool>()) << got.dsinks;
}

// The gradients of attention() by central differences in fp64. With steps of 1e-5 the remainder of a difference is
// 1e-10 of its third derivative, and its rounding 1e-16 / 1e-5.
TEST(Softmax, GradientsAreThoseOfDifferences) {
  const std::shared_ptr<Communicator> self = make_self_communicator();
  const PlanRequest request = causal_zigzag(1, 6);
  const Inputs in = random_inputs(request.shape, 4, at::kDouble);
  std::vector<at::Tensor> tensors = {in.q, in.k, in.v, at::randn({2}, at::kDouble)};
  const auto loss = [&](const std::vector<at::Tensor>& t) {
    AttentionCall call;
    call.request = request;
    call.comm = self.get();
    call.softcap = 1.5;
    return (attention(t[0], t[1], t[2], t[3], call) * in.dout).sum();
  };
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& t : tensors) leaves.push_back(t.clone().requires_grad_());
  loss(leaves).backward();
  constexpr double kStep = 1e-5;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor flat = tensors[i].view({-1}), got = leaves[i].grad().reshape({-1});
    for (int64_t j = 0; j < flat.numel(); ++j) {
      const double x = flat[j].item<double>();
      flat[j].fill_(x + kStep);
      const double above = loss(tensors).item<double>();
      flat[j].fill_(x - kStep);
      const double below = loss(tensors).item<double>();
      flat[j].fill_(x);
      EXPECT_NEAR(got[j].item<double>(), (above - below) / (2 * kStep), 1e-7) << "tensor " << i << ", element " << j;
    }
  }
}

// Sums over rows do not depend on threads or on how memory is laid out.
TEST(Softmax, GradientsOfSinksAreThoseOfRanksTogether) {
  const PlanRequest one = causal_zigzag(1, 96), four = causal_zigzag(4, 96);
  const Inputs in = random_inputs(one.shape, 8, at::kDouble);
  OracleSoftmax softmax;
  softmax.sinks = at::randn({2}, at::kDouble);
  const at::Tensor alone = run_everywhere(one, in, KernelKind::kAuto, {}, {}, {}, softmax).result.dsinks;
  EXPECT_TRUE(agrees(run_everywhere(four, in, KernelKind::kAuto, {}, {}, {}, softmax).result.dsinks, alone, 100));
}

TEST(Softmax, WhatRanksMustAgreeOnIsNamed) {
  const auto call_on = [](Communicator& comm) {
    AttentionCall call;
    call.request = causal_zigzag(3, 48);
    call.comm = &comm;
    return call;
  };
  const at::Tensor q = at::ones({1, 16, 2, 8}), k = at::ones({1, 16, 1, 8}), sinks = at::zeros({2});
  expect_refused_everywhere(
      [&](Communicator& comm) {
        AttentionCall call = call_on(comm);
        call.softcap = comm.rank() == 1 ? 30 : 50;
        attention_forward(q, k, k, call);
      },
      ErrorKind::kMismatch, "soft cap is 50 on ranks 0,2, 30 on rank 1");
  for (const bool ahead : {false, true}) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call = call_on(comm);
          call.sinks = comm.rank() != 1;
          const PlannedCall planned(call);
          if (ahead) plan_calls({planned}, traits_of(q), {"planning", 0});
          attention_forward(q, k, k, planned, call.sinks ? sinks : at::Tensor());
        },
        ErrorKind::kMismatch, "sinks is given on ranks 0,2, none on rank 1");
  }
  const auto refused = [&](const std::function<at::Tensor(AttentionCall&)>& change, const std::string& part) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call = call_on(comm);
          call.sinks = true;
          const at::Tensor given = comm.rank() == 1 ? change(call) : sinks;
          attention_forward(q, k, k, call, given);
        },
        ErrorKind::kPlan, part);
  };
  refused([](AttentionCall&) { return at::Tensor(); }, "no tensor was passed");
  refused([](AttentionCall&) { return at::zeros({3}); }, "expected sinks [2] of a floating dtype on cpu");
  refused([](AttentionCall&) { return at::zeros({2}, at::kLong); }, "got [2] Long");
  for (const double cap : {-1.0, kInfinity, 1e-40, static_cast<double>(NAN)}) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call = call_on(comm);
          call.softcap = cap;
          attention_forward(q, k, k, call);
        },
        ErrorKind::kPlan, "expected a soft cap of scores that is positive and finite");
  }
}

// out of bf16 is rounded once, after its sink, on one rank as on several.
TEST(Softmax, OutIsRoundedOnce) {
  for (const int ranks : {1, 2}) {
    const PlanRequest request = causal_zigzag(ranks, 64);
    const Inputs in = random_inputs(request.shape, 8, at::kBFloat16);
    OracleSoftmax softmax;
    softmax.sinks = at::full({2}, 1.0, at::kFloat);
    const at::Tensor got = run_everywhere(request, in, KernelKind::kReference, {}, {}, {}, softmax).result.out;
    EXPECT_TRUE(got.equal(oracle_of(request, in, {}, {}, softmax).out.to(at::kFloat).to(at::kBFloat16))) << ranks;
  }
}

}  // namespace
}  // namespace annulus::softmax_test
