// Compares attention over many ranks (threads) with the fp64 oracle, forward and backward, and its traffic and memory
// with the plan.
#include "attention/execution/planned_call.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "attention/oracle/oracle.h"
#include "attention/plan/traffic.h"
#include "attention/proof/verifier.h"
#include "attention/testing/any_request.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "runtime/attend/attend.h"
#include "runtime/attend/random_input.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/common/exactness.h"

namespace annulus::attention_test {
namespace {

using testing::agrees;
using testing::as_exact;
using testing::expect_refused_everywhere;
using testing::Expected;
using testing::expected_of;
using testing::Inputs;
using testing::random_inputs;
using testing::RankResults;
using testing::rows_of;
using testing::run_everywhere;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns inputs for the request and logs the command that repeats the case.
Inputs inputs_of(const PlanRequest& request, RandomInput input, KernelKind kernel) {
  RC_LOG() << attend_command(testing::written_out(request), input, kernel, /*backward=*/true) << "\n";
  const AttentionShape& s = request.shape;
  input.batch = s.batch, input.queries = s.q_len, input.keys = s.k_len, input.heads = s.heads;
  input.kv_heads = s.kv_heads;
  const RandomTensors tensors = make_random(input);
  return {tensors.q, tensors.k, tensors.v, tensors.dout};
}

void assert_exact(const OracleResult& got, const Expected& want, at::ScalarType type) {
  const ::testing::AssertionResult outcome = as_exact(got, want, type);
  RC_LOG() << outcome.message();
  RC_ASSERT(static_cast<bool>(outcome));
}

int64_t any_seed() { return *rc::gen::inRange<int64_t>(0, 1000000); }

RC_GTEST_PROP(Attention, EqualsTheOracleInDoublePrecision, ()) {
  const PlanRequest request = testing::any_request();
  const KernelKind kernel = *rc::gen::element(KernelKind::kAuto, KernelKind::kEfficient, KernelKind::kReference);
  const int64_t dim = *rc::gen::element<int64_t>(4, 16, 20);
  const Inputs in = inputs_of(request, {.dim = dim, .dtype = at::kDouble, .seed = any_seed()}, kernel);
  const RankResults run = run_everywhere(request, in, kernel);
  assert_exact(run.result, expected_of(request, in), at::kDouble);
  // The transferred and the held sizes are those of the plan.
  for (int r = 0; r < request.ranks; ++r) {
    const std::shared_ptr<const RankPlan> plan = cached_plan(request, r);
    const Program& program = plan->program;
    const Traffic f = traffic(program, program.forward), b = traffic(program, program.backward);
    const AttentionStats &fs = run.forward[static_cast<size_t>(r)], &bs = run.backward[static_cast<size_t>(r)];
    RC_ASSERT(fs.bytes_sent == f.bytes(dim, 8, 8));
    RC_ASSERT(fs.messages_sent == f.messages());
    RC_ASSERT(bs.bytes_sent == b.bytes(dim, 8, 8));
    RC_ASSERT(bs.messages_sent == b.messages());
    RC_ASSERT(fs.peak_kv_elements == f.peak_kv_rows * dim);
    RC_ASSERT(bs.peak_kv_elements == b.peak_kv_rows * dim);
    RC_ASSERT(bs.peak_grad_elements == b.peak_grad_rows * dim);
    const auto elements = [&](BufferKind kind, const Traffic& t, int64_t rows) {
      return rows * row_content(kind, t.backward).bytes(dim, 1, 1);
    };
    RC_ASSERT(fs.peak_query_elements == elements(BufferKind::kQueries, f, f.peak_query_rows));
    RC_ASSERT(bs.peak_query_elements == elements(BufferKind::kQueries, b, b.peak_query_rows));
    RC_ASSERT(fs.peak_partial_elements == elements(BufferKind::kResults, f, f.peak_result_rows));
    RC_ASSERT(bs.peak_partial_elements == elements(BufferKind::kResults, b, b.peak_result_rows));
  }
}

// Planner, executor and kernels must not assume that heads, batch rows or positions are alike. The slices here have any
// batch rows, heads, strides and bands, and may overlap (a pair in two slices counts twice).
RC_GTEST_PROP(Attention, AnySlicesEqualTheOracle, ()) {
  const AttentionShape any = testing::any_shape();
  PlanRequest request = testing::any_request({2, 4, 2, any.q_len, any.k_len, 0});
  request.pattern = {};
  request.pattern.kind = PatternSpec::Kind::kSlices;
  const auto part = [](int64_t length) {
    const int64_t stride = *rc::gen::element<int64_t>(1, 1, 1, 2, 3), begin = *rc::gen::inRange<int64_t>(0, length);
    return Span{begin, stride, *rc::gen::inRange<int64_t>(1, (length - begin - 1) / stride + 2)};
  };
  std::vector<Slice>& slices = request.pattern.slices;
  for (int64_t i = *rc::gen::inRange(0, 5); i > 0; --i) {
    Slice slice{part(2), part(4), part(request.shape.q_len), part(request.shape.k_len), {}};
    if (*rc::gen::arbitrary<bool>()) slice.band.hi = *rc::gen::inRange(-30, 100);
    if (*rc::gen::arbitrary<bool>()) slice.band.lo = *rc::gen::inRange(-100, 30);
    slices.push_back(slice);
    RC_LOG() << "batch " << to_string(slice.batch) << " heads " << to_string(slice.heads) << " queries "
             << to_string(slice.queries) << " keys " << to_string(slice.keys) << " " << to_string(slice.band) << "\n";
  }
  RC_LOG() << request.text() << "\n";
  RC_ASSERT(verify(request).faults == std::vector<std::string>{});
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const KernelKind kernel = *rc::gen::element(KernelKind::kAuto, KernelKind::kEfficient);
  assert_exact(run_everywhere(request, in, kernel, 0.3).result, expected_of(request, in, 0.3), at::kDouble);
}

RC_GTEST_PROP(Attention, SinglePrecisionErrorIsThatOfAPlainReference, ()) {
  const PlanRequest request = testing::any_request();
  const double magnitude = *rc::gen::element(0.01, 1.0, 10.0);
  const at::ScalarType type = *rc::gen::element(at::kFloat, at::kBFloat16);
  const Inputs in = inputs_of(request, {.dtype = type, .seed = any_seed(), .magnitude = magnitude}, KernelKind::kAuto);
  assert_exact(run_everywhere(request, in, KernelKind::kAuto).result, expected_of(request, in), type);
}

PlanRequest causal_ring(int ranks, int64_t length, LayoutKind layout = LayoutKind::kZigzag) {
  PlanRequest request;
  request.shape = {1, 4, 2, length, length, 0};
  request.pattern.causal = true;
  request.layout = layout;
  request.schedule = ScheduleKind::kRing;
  request.ranks = ranks;
  return request;
}

TEST(Attention, HalfPrecisionsAccumulateInFp32) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const PlanRequest request = causal_ring(4, 128);
    const Inputs in = random_inputs(request.shape, 32, type);
    const RankResults run = run_everywhere(request, in, KernelKind::kAuto);
    EXPECT_EQ(run.result.out.scalar_type(), type);
    EXPECT_EQ(run.result.lse.scalar_type(), at::kFloat);
    const Expected want = expected_of(request, in);
    EXPECT_TRUE(as_exact(run.result, want, type)) << type;
    // Over the ring nothing is rounded that is not on one rank.
    Expected as_alone = want;
    as_alone.usual = run_everywhere(causal_ring(1, 128), in, KernelKind::kAuto).result;
    EXPECT_TRUE(as_exact(run.result, as_alone, type)) << type;
  }
}

TEST(Attention, HugeAndTinyLogitsStayExact) {
  for (const double shift : {-120.0, 1e4}) {
    const PlanRequest request = causal_ring(3, 65, LayoutKind::kStriped);
    Inputs in = random_inputs(request.shape, 8, at::kDouble);
    // One channel gives every pair a score near `shift`.
    in.q.select(3, 0).fill_(1);
    in.k.select(3, 0).fill_(shift);
    const RankResults run = run_everywhere(request, in, KernelKind::kAuto, 1.0);
    EXPECT_TRUE(as_exact(run.result, expected_of(request, in, 1.0), at::kDouble)) << shift;
  }
}

TEST(Attention, RowsWithoutKeysHaveZeroOutputAndMinusInfinityLse) {
  PlanRequest request = causal_ring(4, 64);
  request.shape.query_offset = -20;  // the first 20 queries come before every key
  const Inputs in = random_inputs(request.shape, 8, at::kFloat);
  const RankResults run = run_everywhere(request, in, KernelKind::kAuto);
  EXPECT_TRUE((run.result.out.slice(1, 0, 20) == 0).all().item<bool>());
  EXPECT_TRUE((run.result.lse.slice(2, 0, 20) == -kInfinity).all().item<bool>());
  EXPECT_TRUE((run.result.dq.slice(1, 0, 20) == 0).all().item<bool>());
  EXPECT_TRUE(as_exact(run.result, expected_of(request, in), at::kFloat));
}

TEST(Attention, MaskedNonFiniteValuesDoNotLeak) {
  for (const double poison : {kInfinity, -kInfinity, static_cast<double>(NAN)}) {
    for (const bool window : {false, true}) {
      PlanRequest request = causal_ring(2, 64);
      if (window) {
        request.pattern.kind = PatternSpec::Kind::kWindow;
        request.pattern.left = 9;
      }
      const Inputs in = random_inputs(request.shape, 8, at::kDouble);
      const Expected clean = expected_of(request, in);
      // No query before 40 sees these keys and values.
      in.v.slice(1, 40, 41).fill_(poison);
      in.k.slice(1, 41, 42).fill_(poison);
      const RankResults run = run_everywhere(request, in, KernelKind::kAuto);
      EXPECT_TRUE(agrees(run.result.out.slice(1, 0, 40), clean.out.slice(1, 0, 40), magnitude_of(clean)));
      EXPECT_TRUE(agrees(run.result.lse.slice(2, 0, 40), clean.lse.slice(2, 0, 40), magnitude_of(clean)));
      EXPECT_TRUE(agrees(run.result.dq.slice(1, 0, 40), clean.dq.slice(1, 0, 40), magnitude_of(clean)));
      // A query that sees a NaN or an infinite value has it in its output.
      EXPECT_FALSE(run.result.out.slice(1, 40, 41).isfinite().any().item<bool>());
    }
  }
}

// The same for the keys of another rank, where a rank's own are finite.
TEST(Attention, NonFiniteValuesOfAnotherRankDoNotLeak) {
  PlanRequest request = causal_ring(2, 64);
  request.layout = LayoutKind::kContiguous;
  request.pattern.kind = PatternSpec::Kind::kWindow;
  request.pattern.left = 9;
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const Expected clean = expected_of(request, in);
  // They belong to rank 0, and the last query that sees them is 36. Rank 1 has the queries from 32 on.
  in.v.slice(1, 27, 28).fill_(kInfinity);
  in.k.slice(1, 26, 27).fill_(NAN);
  const RankResults run = run_everywhere(request, in, KernelKind::kAuto);
  EXPECT_TRUE(agrees(run.result.out.slice(1, 37), clean.out.slice(1, 37), magnitude_of(clean)));
  EXPECT_TRUE(agrees(run.result.dq.slice(1, 37), clean.dq.slice(1, 37), magnitude_of(clean)));
  EXPECT_FALSE(run.result.out.slice(1, 36, 37).isfinite().any().item<bool>());
}

TEST(Attention, RepeatedRunsAreBitIdentical) {
  PlanRequest request = causal_ring(4, 256);
  const Inputs in = random_inputs(request.shape, 16, at::kFloat);
  for (const std::string& schedule : schedule_names()) {
    request.schedule = parse_schedule(schedule, "test");
    request.within = schedule == "ring" || schedule == "all-gather" || schedule == "auto" ? 0 : 2;
    for (const LayoutKind layout :
         {LayoutKind::kZigzag, LayoutKind::kBalanced, LayoutKind::kPerDocument, LayoutKind::kStriped}) {
      request.layout = layout;
      const RankResults a = run_everywhere(request, in, KernelKind::kAuto),
                        b = run_everywhere(request, in, KernelKind::kAuto);
      EXPECT_TRUE(a.result.out.equal(b.result.out)) << request.text();
      EXPECT_TRUE(a.result.dq.equal(b.result.dq)) << request.text();
      EXPECT_TRUE(a.result.dk.equal(b.result.dk)) << request.text();
      EXPECT_TRUE(a.result.dv.equal(b.result.dv)) << request.text();
    }
  }
}

// The lines that attention.h and docs/reference/cpp.md show.
TEST(Attention, TheExampleOfTheHeaderComputesAttention) {
  const int64_t length = 24;
  run_ranks(2, [&](Communicator& comm) {
    const at::Tensor q = at::ones({1, length / 2, 8, 4}), k = q, v = q * 3;
    AttentionCall call;
    call.comm = &comm;
    call.request = {.shape = {1, 8, 8, length, length}, .pattern = causal_pattern(), .ranks = comm.size()};
    const at::Tensor out = attention(q, k, v, call);
    EXPECT_TRUE(out.allclose(v)) << "the mean of equal values";
  });
}

TEST(Attention, AutogradNodeGivesTheSameGradients) {
  const PlanRequest request = causal_ring(2, 32);
  const Inputs in = random_inputs(request.shape, 8, at::kDouble);
  const Expected want = expected_of(request, in);
  run_ranks(2, [&](Communicator& comm) {
    AttentionCall call;
    call.request = request;
    call.comm = &comm;
    const auto plan = cached_plan(request, comm.rank());
    const auto leaf = [](at::Tensor t) { return t.clone().requires_grad_(true); };
    const std::vector<Span>&queries = plan->program.query_spans, &keys = plan->program.key_spans;
    const at::Tensor q = leaf(rows_of(in.q, 1, queries)), k = leaf(rows_of(in.k, 1, keys)),
                     v = leaf(rows_of(in.v, 1, keys));
    const at::Tensor out = attention(q, k, v, call);
    out.backward(rows_of(in.dout, 1, queries));
    EXPECT_TRUE(agrees(out.detach(), rows_of(want.out, 1, queries), magnitude_of(want)));
    EXPECT_TRUE(agrees(q.grad(), rows_of(want.dq, 1, queries), magnitude_of(want)));
    EXPECT_TRUE(agrees(k.grad(), rows_of(want.dk, 1, keys), magnitude_of(want)));
    EXPECT_TRUE(agrees(v.grad(), rows_of(want.dv, 1, keys), magnitude_of(want)));
  });
}

at::Tensor run_part(Communicator& comm, const PlanRequest& request, at::ScalarType type, double scale, int64_t rows) {
  AttentionCall call;
  call.request = request;
  call.comm = &comm;
  if (scale != 0) call.scale = scale;
  const auto options = at::TensorOptions().dtype(type);
  return attention_forward(at::zeros({1, rows, 4, 8}, options), at::zeros({1, rows, 2, 8}, options),
                           at::zeros({1, rows, 2, 8}, options), call)
      .out;
}

TEST(Attention, InvalidBackwardInputsAreRefusedOnEveryRank) {
  const PlanRequest request = causal_ring(3, 48);
  for (const bool without_saved : {true, false}) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call;
          call.request = request;
          call.comm = &comm;
          const at::Tensor q = at::zeros({1, 16, 4, 8}), k = at::zeros({1, 16, 2, 8});
          AttentionOutput out = attention_forward(q, k, k, call);
          if (comm.rank() == 1 && without_saved) out.saved_k = at::Tensor();
          const bool short_dout = comm.rank() == 1 && !without_saved;
          attention_backward(short_dout ? at::zeros({1, 15, 4, 8}) : q, q, k, k, out);
        },
        ErrorKind::kPlan, "on rank 1: ");
  }
}

// Some callers can keep only tensors from the forward. This is tested with and without blocks that the plan keeps.
TEST(Attention, BackwardFindsItsPlanByTheRequest) {
  PlanRequest request = causal_ring(3, 48);
  for (const bool keep_last : {true, false}) {
    request.keep_last = keep_last;
    run_ranks(3, [&](Communicator& comm) {
      AttentionCall call;
      call.request = request;
      call.comm = &comm;
      const at::Tensor q = at::randn({1, 16, 4, 8}), k = at::randn({1, 16, 2, 8});
      AttentionOutput out = attention_forward(q, k, k, call);
      EXPECT_EQ(out.saved_k.defined(), keep_last);
      const AttentionGradients want = attention_backward(q, q, k, k, out);
      out.call = call;
      const AttentionGradients got = attention_backward(q, q, k, k, out);
      EXPECT_TRUE(got.dq.equal(want.dq) && got.dk.equal(want.dk) && got.dv.equal(want.dv));
    });
  }
}

// Two calls that differ only in their content, which one rank differentiates in another order than the others.
TEST(Attention, BackwardsOfDifferentCallsAreRefusedOnEveryRank) {
  const PlanRequest request = causal_ring(3, 48);
  for (const bool by_autograd : {false, true}) {
    expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call;
          call.request = request;
          call.comm = &comm;
          const at::Tensor q = at::ones({1, 16, 4, 8}).set_requires_grad(by_autograd), k = at::ones({1, 16, 2, 8});
          const int first = comm.rank() == 1 ? 1 : 0;
          if (by_autograd) {
            const at::Tensor outs[] = {attention(q, k, k, call), attention(q * 2, k, k, call)};
            outs[first].backward(at::ones_like(q));
          } else {
            const AttentionOutput outs[] = {attention_forward(q, k, k, call), attention_forward(q * 2, k, k, call)};
            attention_backward(q, first == 1 ? q * 2 : q, k, k, outs[first]);
          }
        },
        ErrorKind::kMismatch,
        "the call whose backward it is (every rank makes the backwards of the same calls in the same order) is number "
        "1 "
        "on ranks 0,2, number 2 on rank 1");
  }
}

// The caller's own transfers make progress while a single rank computes, forward and backward.
TEST(Attention, CallsThePollFunctionBetweenPieces) {
  const std::shared_ptr<Communicator> self = make_self_communicator();
  AttentionCall call;
  call.request = causal_ring(1, 512);
  call.comm = self.get();
  int64_t polled = 0;
  const PlannedCall planned(call, [&] { ++polled; });
  const at::Tensor q = at::ones({1, 512, 4, 8}), k = at::ones({1, 512, 2, 8});
  const AttentionOutput out = attention_forward(q, k, k, planned);
  const int64_t forward = std::exchange(polled, 0);
  EXPECT_GT(forward, 0);
  attention_backward(q, q, k, k, out);
  EXPECT_GT(polled, 0);
}

TEST(Attention, RanksThatDifferAreNamedOnEveryRank) {
  const PlanRequest request = causal_ring(3, 48);
  PlanRequest other = request;
  other.layout = LayoutKind::kStriped;
  expect_refused_everywhere(
      [&](Communicator& comm) { run_part(comm, comm.rank() == 1 ? other : request, at::kFloat, 0, 16); },
      ErrorKind::kMismatch, "rank 1");
  expect_refused_everywhere(
      [&](Communicator& comm) { run_part(comm, request, comm.rank() == 2 ? at::kDouble : at::kFloat, 0, 16); },
      ErrorKind::kMismatch, "rank 2");
  expect_refused_everywhere(
      [&](Communicator& comm) { run_part(comm, request, at::kFloat, comm.rank() == 0 ? 2 : 1, 16); },
      ErrorKind::kMismatch, "rank 0");
  expect_refused_everywhere(
      [&](Communicator& comm) { run_part(comm, request, at::kFloat, 0, comm.rank() == 1 ? 15 : 16); }, ErrorKind::kPlan,
      "on rank 1: ");
  expect_refused_everywhere([&](Communicator& comm) { run_part(comm, causal_ring(4, 48), at::kFloat, 0, 12); },
                            ErrorKind::kPlan, "4 ranks");
}

}  // namespace
}  // namespace annulus::attention_test
