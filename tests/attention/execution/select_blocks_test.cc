// Compares adaptive block maps with the selection that the oracle makes by the definition, for several numbers of ranks
// and layouts.
#include "attention/execution/select_blocks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "attention/execution/planned_call.h"
#include "attention/oracle/oracle.h"
#include "comm/threads/threads.h"
#include "common/error.h"
#include "tests/common/exactness.h"

namespace annulus::select_blocks_test {
namespace {

at::Tensor rows_of(const at::Tensor& whole, const std::vector<Span>& spans) {
  std::vector<at::Tensor> parts = {whole.slice(1, 0, 0)};
  for (const Span& s : spans) parts.push_back(whole.slice(1, s.begin, s.last() + 1, s.stride));
  return at::cat(parts, 1);
}

// Returns the selection of the ranks, which must agree.
PatternSpec selected_everywhere(const PlanRequest& request, const at::Tensor& q, const at::Tensor& k) {
  std::mutex mutex;
  std::vector<PatternSpec> results;
  run_ranks(request.ranks, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    const PlanRequest selected = select_blocks(request, rows_of(q, query_layout(request).spans[r]),
                                               rows_of(k, key_layout(request).spans[r]), comm, "attention");
    const std::lock_guard lock(mutex);
    results.push_back(selected.pattern);
  });
  for (const PatternSpec& spec : results) EXPECT_EQ(spec.text(), results[0].text());
  return results[0];
}

PlanRequest request_of(const AttentionShape& shape, const std::string& more, int ranks, LayoutKind layout) {
  PlanRequest request;
  request.shape = shape;
  request.pattern = parse_pattern("{ kind = \"blocks\", map = \"adaptive\", block = 16, " + more + " }", "");
  request.ranks = ranks;
  request.layout = layout;
  return request;
}

constexpr LayoutKind kLayouts[] = {LayoutKind::kContiguous, LayoutKind::kZigzag, LayoutKind::kStriped};

// Any number of ranks, layout, keep, kind of query and offset.
PlanRequest any_adaptive_request(int64_t queries, int64_t keys) {
  const int64_t kv_heads = *rc::gen::inRange<int64_t>(1, 3);
  const AttentionShape shape{*rc::gen::inRange<int64_t>(1, 3),
                             kv_heads * *rc::gen::inRange<int64_t>(1, 4),
                             kv_heads,
                             queries,
                             keys,
                             16 * *rc::gen::element<int64_t>(0, 0, -2, 1, 5)};
  const PlanRequest request =
      request_of(shape,
                 "keep = " + std::to_string(*rc::gen::inRange(1, 14)) +
                     (*rc::gen::arbitrary<bool>() ? ", query = \"first\"" : "") +
                     (*rc::gen::arbitrary<bool>() ? ", causal = true" : ""),
                 *rc::gen::element(1, 2, 3, 5),
                 *rc::gen::elementOf(std::vector<LayoutKind>(std::begin(kLayouts), std::end(kLayouts))));
  RC_LOG() << request.text() << "\n";
  return request;
}

RC_GTEST_PROP(SelectBlocks, EqualsTheDefinitionUpToRounding, ()) {
  const int64_t length = *rc::gen::inRange<int64_t>(1, 200);
  const PlanRequest request =
      any_adaptive_request(length, *rc::gen::inRange(0, 3) ? length : *rc::gen::inRange<int64_t>(1, 200));
  const AttentionShape& shape = request.shape;
  const at::ScalarType type = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16);
  const at::Tensor q = at::randn({shape.batch, shape.q_len, shape.heads, 8}).to(type);
  const at::Tensor k = at::randn({shape.batch, shape.k_len, shape.kv_heads, 8}).to(type);
  const PatternSpec spec = selected_everywhere(request, q, k);
  RC_ASSERT(spec.blocks.map == BlocksSpec::Map::kGiven);
  RC_ASSERT(selection_fault(request.pattern, spec, shape, q, k) == "");
  make_pattern(spec, shape);  // accepts the selected map
}

// Sums of small whole numbers over whole blocks of 16 are exact in any order, and many scores are equal. So there is
// one right selection, on any number of ranks.
RC_GTEST_PROP(SelectBlocks, EqualsTheDefinitionWhereSumsAreExact, ()) {
  const PlanRequest request =
      any_adaptive_request(16 * *rc::gen::inRange<int64_t>(1, 13), 16 * *rc::gen::inRange<int64_t>(1, 13));
  const AttentionShape& shape = request.shape;
  const at::Tensor q = at::randint(-1, 2, {shape.batch, shape.q_len, shape.heads, 2}, at::kFloat);
  const at::Tensor k = at::randint(-1, 2, {shape.batch, shape.k_len, shape.kv_heads, 2}, at::kFloat);
  const Count got = count_of(selected_everywhere(request, q, k), shape);
  const Count want = count_of(request.pattern, shape, q, k);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = 0; i < shape.q_len; i += 16) {
        for (int64_t j = 0; j < shape.k_len; j += 16) RC_ASSERT(got(b, h, i + 15, j) == want(b, h, i + 15, j));
      }
    }
  }
}

TEST(SelectBlocks, TiesGoToTheLowerBlock) {
  const AttentionShape shape{1, 2, 1, 150, 150, 0};  // 10 blocks; the last has 6 positions
  for (const LayoutKind layout : kLayouts) {
    for (const int ranks : {1, 2, 3, 5}) {
      const PlanRequest request = request_of(shape, "keep = 3", ranks, layout);
      const at::Tensor q = at::randn({1, 150, 2, 8}), k = at::full({1, 150, 1, 8}, 0.1);
      const BlockMap map = *selected_everywhere(request, q, k).blocks.given;
      for (int64_t row = 0; row < 2 * 10; ++row) {
        std::vector<uint8_t> want(10, 0);
        const int64_t own = row % 10;
        want[0] = want[1] = 1;
        want[static_cast<size_t>(std::max<int64_t>(own, 2))] = 1;  // two others in addition to its own
        const std::vector<uint8_t> all = map.dense();
        EXPECT_EQ(std::vector<uint8_t>(all.begin() + row * 10, all.begin() + (row + 1) * 10), want)
            << "block " << own << ", " << ranks << " ranks";
      }
    }
  }
}

TEST(SelectBlocks, KeepingAllBlocksIsCausalAttentionAndSendsNothing) {
  const AttentionShape shape{2, 4, 2, 100, 100, 0};
  const PlanRequest request = request_of(shape, "keep = 7, causal = true", 3, LayoutKind::kZigzag);
  const at::Tensor q = at::randn({2, 100, 4, 8}), k = at::randn({2, 100, 2, 8});
  run_ranks(3, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    const PlanRequest selected = select_blocks(request, rows_of(q, query_layout(request).spans[r]),
                                               rows_of(k, key_layout(request).spans[r]), comm, "attention");
    EXPECT_EQ(count_pairs(make_pattern(selected.pattern, shape)), 8 * 100 * 101 / 2);
    EXPECT_EQ(comm.stats().bytes_sent, 0);
    EXPECT_EQ(comm.stats().collective_payload, 0);
  });
}

TEST(SelectBlocks, NaNIsTheLowestScore) {
  const AttentionShape shape{1, 1, 1, 64, 64, 0};
  const at::Tensor q = at::full({1, 64, 1, 8}, 1.0), k = at::full({1, 64, 1, 8}, -1.0);
  k.slice(1, 3, 4).fill_(NAN);
  const BlockMap map = *selected_everywhere(request_of(shape, "keep = 2", 2, LayoutKind::kStriped), q, k).blocks.given;
  EXPECT_EQ(map.dense(), (std::vector<uint8_t>{1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1}));
}

TEST(SelectBlocks, SelectsForAdaptiveMembersOfUnionsOnly) {
  const AttentionShape shape{1, 2, 1, 80, 80, 0};
  PlanRequest request = request_of(shape, "keep = 2", 2, LayoutKind::kContiguous);
  PatternSpec both;
  both.kind = PatternSpec::Kind::kUnion;
  both.members = {causal_pattern(), request.pattern};
  const at::Tensor q = at::randn({1, 80, 2, 8}), k = at::randn({1, 80, 1, 8});
  const BlockMap alone = *selected_everywhere(request, q, k).blocks.given;
  request.pattern = both;
  const PatternSpec spec = selected_everywhere(request, q, k);
  EXPECT_EQ(spec.members[0], causal_pattern());
  EXPECT_EQ(*spec.members[1].blocks.given, alone);
  EXPECT_FALSE(is_adaptive(spec));
  // In a causal union no later keys are selected, at whatever level of nesting `causal` is set.
  request.pattern.causal = true;
  request.pattern.members[1].causal = true;
  const BlockMap past = *selected_everywhere(request, q, k).members[1].blocks.given;
  EXPECT_NE(past, alone);
  PatternSpec outer;
  outer.kind = PatternSpec::Kind::kUnion;
  outer.causal = true;
  outer.members = {both};
  request.pattern = outer;
  EXPECT_EQ(*selected_everywhere(request, q, k).members[0].members[1].blocks.given, past);
  request.pattern = causal_pattern();
  EXPECT_EQ(selected_everywhere(request, q, k), causal_pattern());
}

// Forward and backward run with the same selection on any number of ranks, and equal the oracle with that map.
TEST(SelectBlocks, ForwardAndBackwardUseOneSelection) {
  const AttentionShape shape{2, 4, 2, 150, 150, 0};
  const at::TensorOptions fp64 = at::TensorOptions().dtype(at::kDouble);
  const at::Tensor q = at::randn({2, 150, 4, 8}, fp64), k = at::randn({2, 150, 2, 8}, fp64),
                   v = at::randn({2, 150, 2, 8}, fp64), dout = at::randn({2, 150, 4, 8}, fp64);
  for (const int ranks : {1, 3}) {
    for (const char* more : {"keep = 3", "keep = 3, causal = true"}) {
      const PlanRequest request = request_of(shape, more, ranks, LayoutKind::kZigzag);
      run_ranks(ranks, [&](Communicator& comm) {
        const auto r = static_cast<size_t>(comm.rank());
        AttentionCall call;
        call.request = request;
        call.comm = &comm;
        const std::vector<Span> queries = query_layout(request).spans[r], keys = key_layout(request).spans[r];
        const at::Tensor q_here = rows_of(q, queries), k_here = rows_of(k, keys), v_here = rows_of(v, keys);
        const AttentionOutput out = attention_forward(q_here, k_here, v_here, call);
        const AttentionGradients got = attention_backward(rows_of(dout, queries), q_here, k_here, v_here, out);
        const PatternSpec& used = out.program().request.pattern;
        EXPECT_EQ(selection_fault(request.pattern, used, shape, q, k), "");
        const OracleResult want = oracle(q, k, v, dout, 1 / std::sqrt(8.0), count_of(used, shape));
        const auto expect_near = [&](const at::Tensor& x, const at::Tensor& whole, const std::vector<Span>& spans) {
          // Sums of products of 8 elements, which are normally distributed, times an element: less than 100 in sum.
          EXPECT_TRUE(testing::agrees(x, rows_of(whole, spans), 100));
        };
        expect_near(out.out, want.out, queries);
        expect_near(got.dq, want.dq, queries);
        expect_near(got.dk, want.dk, keys);
        expect_near(got.dv, want.dv, keys);
      });
    }
  }
}

// Counts all operators that this thread calls. On a GPU each of them would be a launch, a copy or a wait.
class OperatorCount {
 public:
  OperatorCount() {
    count_ = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  int count() const { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) {
    ++count_;
    return nullptr;
  }
  static thread_local int count_;
  at::CallbackHandle handle_;
};
thread_local int OperatorCount::count_ = 0;

TEST(SelectBlocks, OperatorCountIsIndependentOfTheShape) {
  const auto self = make_self_communicator();
  const auto operators = [&](int64_t batch, int64_t heads, int64_t length, const char* more) {
    const PlanRequest request =
        request_of({batch, heads, heads / 2, length, length, 0}, more, 1, LayoutKind::kContiguous);
    const at::Tensor q = at::randn({batch, length, heads, 8}), k = at::randn({batch, length, heads / 2, 8});
    const OperatorCount counted;
    select_blocks(request, q, k, *self, "attention");
    return counted.count();
  };
  for (const char* more : {"keep = 3", "keep = 3, causal = true", "keep = 3, query = \"first\""}) {
    const int few = operators(1, 2, 100, more);
    EXPECT_EQ(operators(3, 16, 100, more), few) << more;
    EXPECT_EQ(operators(1, 2, 500, more), few) << more;
  }
}

// The number of operators depends on how the stride of the rows fits into the blocks, not on the number of blocks.
TEST(SelectBlocks, OperatorCountIsIndependentOfTheLengthIfStriped) {
  const auto operators = [&](int ranks, int64_t length) {
    const PlanRequest request = request_of({1, 1, 1, length, length, 0}, "keep = 3", ranks, LayoutKind::kStriped);
    const at::Tensor q = at::randn({1, length, 1, 8}), k = at::randn({1, length, 1, 8});
    std::mutex mutex;
    int most = 0;
    run_ranks(ranks, [&](Communicator& comm) {
      const auto r = static_cast<size_t>(comm.rank());
      const at::Tensor q_here = rows_of(q, query_layout(request).spans[r]),
                       k_here = rows_of(k, key_layout(request).spans[r]);
      const OperatorCount counted;
      select_blocks(request, q_here, k_here, comm, "attention");
      const std::lock_guard lock(mutex);
      most = std::max(most, counted.count());
    });
    return most;
  };
  for (const int ranks : {2, 3}) EXPECT_EQ(operators(ranks, 1440), operators(ranks, 480)) << ranks << " ranks";
}

TEST(SelectBlocks, RefusesOffsetsWithinABlock) {
  const PlanRequest request = request_of({1, 1, 1, 32, 32, 8}, "keep = 1", 1, LayoutKind::kContiguous);
  EXPECT_THROW(selected_everywhere(request, at::randn({1, 32, 1, 8}), at::randn({1, 32, 1, 8})), Error);
}

}  // namespace
}  // namespace annulus::select_blocks_test
