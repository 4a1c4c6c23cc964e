// Tests of attention with masks of tokens and kept keys (padding) over many ranks and with every kernel for CPUs,
// forward and backward. The oracle is given the bytes that the mask was made from, so that a mistake in the mask is not
// in both results.
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/oracle/oracle.h"
#include "attention/plan/plan.h"
#include "attention/testing/any_pattern.h"
#include "attention/testing/any_request.h"
#include "comm/threads/threads.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/common/exactness.h"

namespace annulus::token_masks_test {
namespace {

using testing::Inputs;

constexpr double kTerms = 1000;  // more than the magnitudes that are added up to any result here

struct Drawn {
  int64_t batch = 1, heads = 1, queries = 0, keys = 0;
  std::vector<uint8_t> shown;

  bool at(int64_t b, int64_t h, int64_t query, int64_t key) const {
    const int64_t plane = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
    return shown[static_cast<size_t>((plane * queries + query) * keys + key)] != 0;
  }
};

// A mask of one kind: pairs at random, a band, keys up to one for each query, all pairs, or one.
Drawn any_mask(const AttentionShape& shape) {
  Drawn mask{*rc::gen::element(int64_t{1}, shape.batch),
             *rc::gen::element(int64_t{1}, shape.heads),
             shape.q_len,
             shape.k_len,
             {}};
  const int kind = *rc::gen::inRange(0, 5);
  const int64_t width = *rc::gen::inRange<int64_t>(0, 160), many = *rc::gen::inRange<int64_t>(1, 100);
  uint64_t state = *rc::gen::arbitrary<uint32_t>();
  const auto draw = [&](int64_t n) {
    state = state * 6364136223846793005 + 1442695040888963407;
    return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(n));
  };
  for (int64_t plane = 0; plane < mask.batch * mask.heads; ++plane) {
    for (int64_t query = 0; query < shape.q_len; ++query) {
      const int64_t end = draw(shape.k_len + 1);
      for (int64_t key = 0; key < shape.k_len; ++key) {
        const bool shown = kind == 0   ? draw(100) < many
                           : kind == 1 ? std::abs(key - query) <= width
                           : kind == 2 ? key < end
                                       : kind == 3;
        mask.shown.push_back(shown);
      }
    }
  }
  mask.shown[static_cast<size_t>(shape.k_len * draw(shape.q_len))] = 1;
  return mask;
}

PatternSpec with_mask(const Drawn& mask, const std::string& text = "{ kind = \"full\" }") {
  PatternSpec spec = parse_pattern(text, "test");
  spec.mask = given_mask(std::make_shared<const TokenMask>(
      token_mask_from_dense(mask.shown.data(), mask.batch, mask.heads, mask.queries, mask.keys)));
  return spec;
}

PlanRequest any_masked_request(const AttentionShape& shape, const PatternSpec& pattern) {
  PlanRequest request;
  request.shape = shape;
  request.pattern = pattern;
  request.layout = *rc::gen::element(LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped,
                                     LayoutKind::kBalanced, LayoutKind::kPerDocument);
  request.schedule = *rc::gen::element(ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast,
                                       ScheduleKind::kDoubleRing, ScheduleKind::kUlysses, ScheduleKind::kUlyssesRing,
                                       ScheduleKind::kMesh);
  request.ranks = *rc::gen::inRange(1, 6);
  const bool groups = request.schedule != ScheduleKind::kRing && request.schedule != ScheduleKind::kAllGather;
  if (groups && request.ranks % 2 == 0) request.within = *rc::gen::element(0, 1, 2);
  testing::fit_heads(request);
  return request;
}

void expect_result(const OracleResult& got, const OracleResult& want) {
  for (at::Tensor OracleResult::*const result :
       {&OracleResult::out, &OracleResult::lse, &OracleResult::dq, &OracleResult::dk, &OracleResult::dv}) {
    const ::testing::AssertionResult exact = testing::agrees(got.*result, want.*result, kTerms);
    RC_LOG() << exact.message() << "\n";
    RC_ASSERT(static_cast<bool>(exact));
  }
}

OracleResult oracle_with(const Inputs& in, const Count& count) {
  return oracle(in.q, in.k, in.v, in.dout, 1 / std::sqrt(static_cast<double>(in.q.size(3))), count);
}

RC_GTEST_PROP(TokenMasks, EqualTheOracleOfTheirBytes, ()) {
  const auto length = [] { return *rc::gen::element<int64_t>(1, 60, 127, 128, 129, 200, 260); };
  const int64_t n = length();
  const AttentionShape shape{*rc::gen::inRange<int64_t>(1, 3),       4, *rc::gen::element<int64_t>(1, 2, 4), n,
                             *rc::gen::inRange(0, 2) ? n : length(), 0};
  const Drawn mask = any_mask(shape);
  const bool causal = *rc::gen::arbitrary<bool>();
  const PlanRequest request = any_masked_request(
      shape, with_mask(mask, causal ? "{ kind = \"window\", left = -1, right = 0 }" : "{ kind = \"full\" }"));
  const KernelKind kernel = *rc::gen::element(KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference);
  RC_LOG() << request.text() << ", " << to_string(kernel) << "\n";
  if (causal && request.pattern.mask.given->nearest > 0) RC_DISCARD("refused");
  const Inputs in = testing::random_inputs(shape, 8, at::kDouble);
  expect_result(testing::run_everywhere(request, in, kernel).result,
                oracle_with(in, [&](int64_t b, int64_t h, int64_t query, int64_t key) -> int64_t {
                  return (!causal || key <= query) && mask.at(b, h, query, key);
                }));
}

// A mask of one member of a union hides nothing of the others.
RC_GTEST_PROP(TokenMasks, OfAMemberEqualTheOracleBesideAWindowAndATree, ()) {
  const int64_t n = *rc::gen::element<int64_t>(60, 129);
  const AttentionShape shape{1, 4, *rc::gen::element<int64_t>(1, 2, 4), n, n, 0};
  PatternSpec rest = parse_pattern(
      "{ kind = \"union\", of = [{ kind = \"window\", left = 20, right = 3, sink_tokens = 5 }] }", "test");
  PatternSpec tree;
  tree.kind = PatternSpec::Kind::kTree;
  const std::vector<std::vector<int64_t>> parents = {{-1, 0, 1, 1, 0}, {-1, 0, -1, 2, 2}};
  tree.tree = {{testing::any_documents(n, 5)}, {*rc::gen::elementOf(parents)}};
  rest.members.push_back(tree);
  rest.causal = *rc::gen::arbitrary<bool>();
  const Count others = count_of(rest, shape);
  const Drawn mask = any_mask(shape);
  PatternSpec all = rest;
  all.members.insert(all.members.begin() + *rc::gen::inRange(0, 3), with_mask(mask));
  if (rest.causal && with_mask(mask).mask.given->nearest > 0) RC_DISCARD("refused");
  const PlanRequest request = any_masked_request(shape, all);
  const KernelKind kernel = *rc::gen::element(KernelKind::kCpu, KernelKind::kReference);
  RC_LOG() << request.text() << ", " << to_string(kernel) << "\n";
  const Inputs in = testing::random_inputs(shape, 8, at::kDouble);
  expect_result(testing::run_everywhere(request, in, kernel).result,
                oracle_with(in, [&](int64_t b, int64_t h, int64_t query, int64_t key) -> int64_t {
                  return others(b, h, query, key) + ((!rest.causal || key <= query) && mask.at(b, h, query, key));
                }));
}

// Each rank has a mask that holds the bits of the queries that it owns or computes. Ranks that are threads share
// caches.
RC_GTEST_PROP(TokenMasks, RanksNeedOnlyTheBitsOfTheirQueries, ()) {
  const int64_t n = *rc::gen::element<int64_t>(100, 129, 200);
  const AttentionShape shape{1, 4, 2, n, n, 0};
  const Drawn mask = any_mask(shape);
  const PlanRequest whole = any_masked_request(shape, with_mask(mask));
  const Layout layout = query_layout(whole);
  const Inputs in = testing::random_inputs(shape, 8, at::kDouble);
  const OracleResult want = oracle_with(
      in, [&](int64_t b, int64_t h, int64_t query, int64_t key) -> int64_t { return mask.at(b, h, query, key); });
  std::vector<::testing::AssertionResult> results(static_cast<size_t>(whole.ranks), ::testing::AssertionSuccess());
  run_ranks(whole.ranks, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    const std::vector<Span>& own = layout.spans[r];
    const MaskRows rows = [&](int64_t number, int64_t first, int64_t) {
      return mask.shown.data() + (number * n + first) * n;
    };
    AttentionCall call;
    call.comm = &comm;
    call.prove = true;
    call.request = whole;
    call.request.pattern.mask = given_mask(std::make_shared<const TokenMask>(
        make_token_mask(mask.batch, mask.heads, n, n, rows, needed_bits(whole, comm.rank()), "the mask")));
    const auto of = [&](const at::Tensor& t) { return testing::rows_of(t, 1, own); };
    const AttentionOutput out = attention_forward(of(in.q), of(in.k), of(in.v), call);
    const AttentionGradients d = attention_backward(of(in.dout), of(in.q), of(in.k), of(in.v), out);
    for (const auto& [got, expected] : {std::pair{&out.out, &want.out}, {&d.dq, &want.dq}, {&d.dk, &want.dk}}) {
      const ::testing::AssertionResult exact = testing::agrees(*got, of(*expected), kTerms);
      if (!exact) results[r] = exact;
    }
  });
  for (const ::testing::AssertionResult& result : results) {
    RC_LOG() << result.message() << "\n";
    RC_ASSERT(static_cast<bool>(result));
  }
}

TEST(TokenMasks, QueriesWithoutAKeyGiveZerosEvenBesideInfinities) {
  const int64_t n = 200;
  Drawn mask{1, 1, n, n, std::vector<uint8_t>(static_cast<size_t>(n * n))};
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j)
      mask.shown[static_cast<size_t>(i * n + j)] = i % 3 != 0 && j != 7 && (i + j) % 2 == 0;
  }
  PlanRequest request;
  request.shape = {1, 2, 1, n, n, 0};
  request.pattern = with_mask(mask);
  request.layout = LayoutKind::kZigzag;
  request.ranks = 3;
  for (const bool infinite : {false, true}) {
    Inputs in = testing::random_inputs(request.shape, 8, at::kFloat);
    if (infinite) {  // of a key that no query sees
      in.k.select(1, 7).fill_(INFINITY);
      in.v.select(1, 7).fill_(NAN);
    }
    for (const KernelKind kernel : {KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference}) {
      const OracleResult got = testing::run_everywhere(request, in, kernel).result;
      for (const at::Tensor& t : {got.out, got.dq, got.dk, got.dv}) EXPECT_TRUE(t.isfinite().all().item<bool>());
      for (int64_t i = 0; i < n; i += 3) {
        EXPECT_EQ(got.out.select(1, i).count_nonzero().item<int64_t>(), 0);
        EXPECT_EQ(got.dq.select(1, i).count_nonzero().item<int64_t>(), 0);
        EXPECT_EQ(got.lse.select(2, i).isneginf().sum().item<int64_t>(), 2);
      }
      EXPECT_EQ(got.dk.select(1, 7).count_nonzero().item<int64_t>(), 0);
    }
  }
}

// bf16 is multiplied in pairs where the processor can, which has a table of functions of its own.
TEST(TokenMasks, AreAsExactInBf16AsAPlainComputation) {
  const int64_t n = 300;
  Drawn mask{2, 1, n, n, {}};
  const at::Tensor random = at::rand({2 * n * n});
  for (int64_t i = 0; i < random.numel(); ++i) mask.shown.push_back(random.const_data_ptr<float>()[i] < 0.4F);
  PlanRequest request;
  request.shape = {2, 4, 2, n, n, 0};
  request.pattern = with_mask(mask, "{ kind = \"causal\" }");
  request.ranks = 2;
  request.layout = LayoutKind::kStriped;
  const Inputs in = testing::random_inputs(request.shape, 64, at::kBFloat16);
  const testing::RankResults run = testing::run_everywhere(request, in, KernelKind::kCpu);
  const testing::Expected expected = testing::expected_of(request, in);
  EXPECT_TRUE(testing::as_exact(run.result, expected, at::kBFloat16));
}

// In units of 8 bytes: a place for each query of each plane, and three blocks of two words for each row that is held.
TEST(TokenMasks, TakeTheMemoryOfTheRowsThatARankOwnsOrComputes) {
  const int64_t n = 320;
  PlanRequest request;
  request.shape = {1, 4, 4, n, n, 0};
  request.ranks = 4;
  Drawn mask{1, 4, n, n, std::vector<uint8_t>(static_cast<size_t>(4 * n * n))};
  for (size_t i = 0; i < mask.shown.size(); ++i) mask.shown[i] = i % 7 % 2;
  const TokenMask all = *with_mask(mask).mask.given;
  ASSERT_EQ(all.planes(), 4);
  const int64_t own = 4 * n / 4;
  const auto expect_held = [&](ScheduleKind schedule, int within, int64_t rows) {
    request.schedule = schedule, request.within = within;
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(all.bytes_of_bits(needed_bits(request, rank)), 8 * (4 * n + 6 * rows)) << to_string(schedule);
    }
  };
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kGroupCast, ScheduleKind::kAuto}) {
    expect_held(schedule, 0, own);
  }
  expect_held(ScheduleKind::kUlysses, 0, own + 3 * n / 4);      // one head of the queries of three others
  expect_held(ScheduleKind::kUlyssesRing, 2, own + 2 * n / 4);  // two heads of those of one other
  expect_held(ScheduleKind::kMesh, 2, own + 4 * n / 4);         // four heads of those of one other
}

TEST(TokenMasks, OfOtherRanksAreRefusedBeforeAnythingIsSent) {
  const int64_t n = 60;
  const std::vector<uint8_t> shown = [] {
    std::vector<uint8_t> bytes(static_cast<size_t>(60 * 60));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = i % 2 == 0;
    return bytes;
  }();
  const MaskRows rows = [&](int64_t, int64_t first, int64_t) { return shown.data() + first * n; };
  const Inputs in = testing::random_inputs({1, 2, 1, n, n, 0}, 8, at::kFloat);
  const auto expect_refused = [&](LayoutKind layout, ScheduleKind schedule) {
    testing::expect_refused_everywhere(
        [&](Communicator& comm) {
          AttentionCall call;
          call.comm = &comm;
          call.request = testing::causal_zigzag(3, n);
          call.request.pattern.mask = given_mask(std::make_shared<const TokenMask>(
              make_token_mask(1, 1, n, n, rows, needed_bits(call.request, comm.rank()), "the mask")));
          call.request.layout = layout;
          call.request.schedule = schedule;
          if (moves_queries(schedule)) call.request.within = 3;
          const std::vector<Span> queries = query_layout(call.request).spans[static_cast<size_t>(comm.rank())];
          const auto of = [&](const at::Tensor& t) { return testing::rows_of(t, 1, queries); };
          attention_forward(of(in.q), of(in.k), of(in.v), call);
        },
        ErrorKind::kPlan, "does not hold the bits of query");
  };
  expect_refused(LayoutKind::kContiguous, ScheduleKind::kRing);
  expect_refused(LayoutKind::kZigzag, ScheduleKind::kMesh);
}

}  // namespace
}  // namespace annulus::token_masks_test
