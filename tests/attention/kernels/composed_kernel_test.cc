// Tests what the composed kernel does only once or not at all: compositions of a program that runs again, passes over
// memory that merge results, and copies of gradients. kernel_test.cc tests its results.
#include "attention/kernels/composed_kernel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/plans.h"
#include "memory/caches.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/attention/kernels/masked_operator.h"

namespace annulus::composed_kernel_test {
namespace {

using testing::as_exact;
using testing::by_definition;
using testing::Case;
using testing::Expected;
using testing::MaskedOperator;
using testing::Result;
using testing::right;

// Remembers its last results.
class Recorded : public MaskedOperator {
 public:
  Recorded() : MaskedOperator(/*any_band=*/true) {}
  Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Band& band,
                  double scale) const override {
    Forward result = MaskedOperator::forward(q, k, v, band, scale);
    result.out = result.out.clone();  // no view, so that only the holders of this tensor count in held()
    forwards.push_back(result);
    return result;
  }
  Backward backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& out, const at::Tensor& lse, const Band& band, double scale) const override {
    backwards.push_back(MaskedOperator::backward(dout, q, k, v, out, lse, band, scale));
    return backwards.back();
  }
  // How many results of forwards somebody else holds as well.
  int64_t held() const {
    return std::count_if(forwards.begin(), forwards.end(),
                         [](const Forward& f) { return f.out.storage().use_count() > 1; });
  }
  mutable std::vector<Forward> forwards;
  mutable std::vector<Backward> backwards;
};

ComposedKernelOptions without_gathering() {
  ComposedKernelOptions options;
  options.limits.fill = 1;
  return options;
}

// Two batch rows, 64 queries, 64 keys, 4 heads that share 2 kv heads, and one tile of all of them.
Case whole_case(at::ScalarType type, Band band = {}) {
  const auto options = at::TensorOptions().dtype(type);
  Case c;
  c.q = at::randn({2, 64, 4, 16}, options), c.dout = at::randn({2, 64, 4, 16}, options);
  c.keys = {at::randn({2, 64, 2, 16}, options), at::randn({2, 64, 2, 16}, options), {0, 1, 2}, {0, 1, 2}};
  c.grad_batch = c.grad_heads = {0, 1, 2}, c.grad_rows = 64;
  c.call.group = 2, c.call.scale = 0.25;
  Tile t;
  t.batch = {0, 1, 2}, t.heads = {0, 1, 4};
  t.query_rows = t.query_positions = t.key_rows = t.key_positions = t.grad_rows = {0, 1, 64};
  t.band = band;
  c.tiles = {t};
  return c;
}

bool same(const Result& a, const Result& b) {
  return a.out.equal(b.out) && a.lse.equal(b.lse) && a.dq.equal(b.dq) && a.dk.equal(b.dk) && a.dv.equal(b.dv);
}

// Tiles of a program never change. This test changes them nevertheless, which shows that nothing reads them again.
TEST(Compositions, TilesOfAProgramAreReadOnce) {
  const auto make = [] { return make_composed_kernel({std::make_shared<MaskedOperator>(true)}, {}); };
  for (const bool one_head : {false, true}) {
    Case c = testing::scattered(at::kDouble, one_head);
    c.call.program = ObjectNumber().value();
    const Result first = testing::run(c, make);
    EXPECT_TRUE(right(first, c));
    for (Tile& tile : c.tiles) tile.query_rows = tile.query_positions = {0, 1, 1};
    EXPECT_TRUE(same(testing::run(c, make), first)) << "the tiles were read again";
    // The same tiles of another program, and of none.
    c.call.program = ObjectNumber().value();
    const Expected want = by_definition(c);
    EXPECT_TRUE(right(testing::run(c, make), c, want));
    c.call.program = 0;
    EXPECT_TRUE(right(testing::run(c, make), c, want));
  }
}

TEST(Compositions, CopiesOfAProgramHaveNumbersOfTheirOwn) {
  PlanRequest request;
  request.shape = {1, 2, 2, 32, 32, 0};
  Program program = make_program(request, 0);
  const uint64_t number = program.number.value();
  Program copy = program;
  EXPECT_NE(copy.number.value(), number);
  EXPECT_TRUE(copy == program);
  const Program moved = std::move(copy);
  EXPECT_NE(moved.number.value(), number);
  program = moved;
  EXPECT_NE(program.number.value(), number);
  EXPECT_NE(program.number.value(), moved.number.value());
  EXPECT_EQ(cached_plan(request, 0)->program.number.value(), cached_plan(request, 0)->program.number.value());
}

CacheStats compositions() {
  for (const CacheReport& report : cache_reports()) {
    if (report.name == "compositions") return report.stats;
  }
  return {};
}

// The number of times that a rank gives tiles to its kernel in a direction: for each step once for each block.
int64_t calls_of(const std::vector<Step>& steps) {
  int64_t calls = 0;
  for (const Step& step : steps) {
    for (size_t i = 0; i < step.tiles.size(); ++i) {
      const Tile &t = step.tiles[i], &before = step.tiles[i == 0 ? 0 : i - 1];
      calls += i == 0 || t.buffer != before.buffer || t.block != before.block || t.grad_buffer != before.grad_buffer ||
               t.grad_block != before.grad_block;
    }
  }
  return calls;
}

// The first call of a program composes the tiles of each step, on each rank; later calls compose nothing. A window
// makes tiles that are gathered, and a full pattern large ones.
TEST(Compositions, EachStepOfAProgramIsComposedOnce) {
  at::set_num_threads(1);
  for (const char* pattern : {"{ kind = \"window\", left = 20, right = 0 }", "{ kind = \"full\" }"}) {
    for (const auto& [length, ranks] : {std::pair<int64_t, int>{192, 4}, {256, 4}, {192, 1}}) {  // three programs
      PlanRequest request;
      request.shape = {1, 4, 2, length, length, 0};
      request.pattern = parse_pattern(pattern, "test");
      request.ranks = ranks;
      request.schedule = ScheduleKind::kRing;
      int64_t calls = 0;
      for (int r = 0; r < request.ranks; ++r) {
        const auto plan = cached_plan(request, r);
        calls += calls_of(plan->program.forward) + calls_of(plan->program.backward);
      }
      ASSERT_GE(calls, 2 * request.ranks);
      const testing::Inputs in = testing::random_inputs(request.shape, 16, at::kDouble);
      const Expected want = testing::expected_of(request, in);
      for (int time = 0; time < 3; ++time) {
        const CacheStats before = compositions();
        const testing::RankResults run = testing::run_everywhere(request, in, KernelKind::kEfficient);
        const CacheStats after = compositions();
        EXPECT_EQ(after.misses - before.misses, time == 0 ? calls : 0) << pattern << length << " " << time;
        EXPECT_EQ(after.hits - before.hits, time == 0 ? 0 : calls) << pattern << length << " " << time;
        EXPECT_TRUE(as_exact(run.result, want, at::kDouble)) << pattern << length;
      }
    }
  }
}

// Results of up to eight blocks wait for each other, so that one pass over memory merges them.
TEST(WaitingResults, EightBlocksAreMergedInOnePass) {
  at::set_num_threads(1);
  Case c = whole_case(at::kDouble);
  const auto recorded = std::make_shared<Recorded>();
  const auto kernel = make_composed_kernel({recorded}, without_gathering());
  kernel->begin_forward(c.q, c.call);
  for (int block = 1; block <= 9; ++block) {
    kernel->forward(c.keys, c.tiles, {});
    EXPECT_EQ(recorded->held(), block <= 8 ? block : 1) << block;
  }
  at::Tensor out, lse;
  kernel->finish_forward(out, lse);
  EXPECT_EQ(recorded->held(), 0);
  // Each pair is counted nine times.
  const Expected once = by_definition(c);
  EXPECT_TRUE(as_exact(&OracleResult::out, out, once, at::kDouble));
  EXPECT_TRUE(as_exact(&OracleResult::lse, lse - std::log(9), once, at::kDouble));
}

// So do results of some heads and of rows with a stride, as those of dilated attention.
TEST(WaitingResults, SomeHeadsAndStridedRowsWaitToo) {
  at::set_num_threads(1);
  Case c = whole_case(at::kDouble);
  std::vector<Tile> tiles;
  for (int64_t i = 0; i < 4; ++i) {
    Tile tile = c.tiles[0];
    tile.heads = {i / 2 * 2, 1, 2};  // the heads of one kv head
    tile.query_rows = tile.query_positions = {i % 2, 2, 32};
    tiles.push_back(tile);
  }
  c.tiles = tiles;
  const auto recorded = std::make_shared<Recorded>();
  const auto kernel = make_composed_kernel({recorded}, without_gathering());
  kernel->begin_forward(c.q, c.call);
  for (int block = 1; block <= 3; ++block) {
    kernel->forward(c.keys, c.tiles, {});
    EXPECT_EQ(recorded->held(), block <= 2 ? 4 * block : 4) << block;
  }
  at::Tensor out, lse;
  kernel->finish_forward(out, lse);
  EXPECT_EQ(recorded->held(), 0);
  const Expected once = by_definition(c);
  EXPECT_TRUE(as_exact(&OracleResult::out, out, once, at::kDouble));
  EXPECT_TRUE(as_exact(&OracleResult::lse, lse - std::log(3), once, at::kDouble));
}

// Eight results of two heads, then eight of a batch row's last rows and other heads, which are merged in place, and one
// more of the first heads.
TEST(WaitingResults, PartsOfFewRowsAreMergedInTheirPlace) {
  at::set_num_threads(1);
  Case c = whole_case(at::kDouble);
  Tile some = c.tiles[0], few = c.tiles[0];
  some.heads = {0, 1, 2};
  few.batch = {1, 1, 1}, few.heads = {2, 1, 2};
  few.query_rows = few.query_positions = {32, 1, 32};
  c.tiles = std::vector<Tile>(8, some);
  c.tiles.insert(c.tiles.end(), 8, few);
  c.tiles.push_back(some);
  const auto recorded = std::make_shared<Recorded>();
  const Result got = testing::run(c, [&] { return make_composed_kernel({recorded}, without_gathering()); });
  EXPECT_TRUE(right(got, c));
  EXPECT_EQ(recorded->forwards.size(), 17u);
}

// A part of 2 x 64 rows x 4 heads x 16 takes 64 KiB.
TEST(WaitingResults, HoldAtMostWhatTheKernelDeclares) {
  at::set_num_threads(1);
  Case c = whole_case(at::kDouble);
  constexpr int64_t kPart = 64 << 10;
  for (const int64_t parts : {1, 3, 8}) {
    const auto recorded = std::make_shared<Recorded>();
    ComposedKernelOptions options = without_gathering();
    options.most_waiting = parts * kPart + 1000;
    const auto kernel = make_composed_kernel({recorded}, options);
    kernel->begin_forward(c.q, c.call);
    int64_t most = 0;
    for (int block = 1; block <= 20; ++block) {
      kernel->forward(c.keys, c.tiles, {});
      most = std::max(most, recorded->held());
    }
    EXPECT_EQ(most, parts);
    const CallSize size{.batch = 2,
                        .queries = 64,
                        .heads = 4,
                        .kv_heads = 2,
                        .head_dim = 16,
                        .keys = 64,
                        .blocks = 20,
                        .type = at::kDouble};
    for (const Charge& charge : kernel->charges(size)) {
      if (charge.what != "results that wait") continue;
      EXPECT_GE(charge.bytes, (1 + most) * kPart);  // the sum and the parts
      EXPECT_LE(charge.bytes, (1 + most) * kPart + 1000);
    }
    at::Tensor out, lse;
    kernel->finish_forward(out, lse);
    EXPECT_TRUE(as_exact(&OracleResult::lse, lse - std::log(20), by_definition(c), at::kDouble));
  }
  // A single result is returned as it is, however large.
  const auto recorded = std::make_shared<Recorded>();
  ComposedKernelOptions options = without_gathering();
  options.most_waiting = 1000;
  const auto kernel = make_composed_kernel({recorded}, options);
  at::Tensor out, lse;
  kernel->begin_forward(c.q, c.call);
  kernel->forward(c.keys, c.tiles, {});
  kernel->finish_forward(out, lse);
  EXPECT_EQ(out.data_ptr(), recorded->forwards[0].out.data_ptr());
}

// One call that covers a block gives its dk and dv as they are; anything else is left to backward().
TEST(WholeBackward, GradientsAreTheOperatorsOwnTensors) {
  at::set_num_threads(1);
  const Case c = whole_case(at::kDouble, {-Band::kUnbounded, 0});
  const Expected want = by_definition(c);
  const auto recorded = std::make_shared<Recorded>();
  const auto whole = [&](const Case& of, const ComposedKernelOptions& options) {
    const auto kernel = make_composed_kernel({recorded}, options);
    kernel->begin_backward(of.dout, of.q, want.out, want.lse, of.call);
    const size_t before = recorded->backwards.size();
    const auto gradients = kernel->whole_backward(of.keys, of.tiles, {});
    EXPECT_EQ(recorded->backwards.size() - before, gradients ? 1u : 0u);
    if (gradients) {
      EXPECT_TRUE(as_exact(&OracleResult::dq, kernel->finish_backward(), want, at::kDouble));
      EXPECT_EQ(kernel->peak_result_elements(), 0);
    }
    return gradients;
  };
  const auto gradients = whole(c, without_gathering());
  ASSERT_TRUE(gradients);
  EXPECT_EQ(gradients->dk.data_ptr(), recorded->backwards.back().dk.data_ptr());
  EXPECT_EQ(gradients->dv.data_ptr(), recorded->backwards.back().dv.data_ptr());
  EXPECT_TRUE(as_exact(&OracleResult::dk, gradients->dk, want, at::kDouble));
  EXPECT_TRUE(as_exact(&OracleResult::dv, gradients->dv, want, at::kDouble));

  Case some_keys = c, some_heads = c, several = c, dropped = c;
  some_keys.tiles[0].query_rows = some_keys.tiles[0].key_rows = some_keys.tiles[0].grad_rows = {0, 1, 63};
  some_keys.tiles[0].query_positions = some_keys.tiles[0].key_positions = {0, 1, 63};
  some_heads.tiles[0].heads = {0, 1, 2};
  several.tiles.push_back(c.tiles[0]);
  dropped.call.dropout.rate = 0.5;
  for (const Case* other : {&some_keys, &some_heads, &several, &dropped}) {
    EXPECT_FALSE(whole(*other, without_gathering()));
  }
}

// In a call on one rank nothing but the gradients themselves is held, and they are those of the oracle. Over several
// ranks, and where tiles are gathered, results are added to accumulators.
TEST(WholeBackward, OneRankHoldsNoResultsBesidesItsGradients) {
  at::set_num_threads(1);
  for (const at::ScalarType type : {at::kDouble, at::kBFloat16}) {
    for (const int ranks : {1, 2}) {
      for (const char* pattern : {"{ kind = \"causal\" }", "{ kind = \"window\", left = 5, right = 0 }"}) {
        PlanRequest request;
        request.shape = {2, 4, 2, 96, 96, 0};
        request.pattern = parse_pattern(pattern, "test");
        request.ranks = ranks;
        const testing::Inputs in = testing::random_inputs(request.shape, 16, type);
        const testing::RankResults run = testing::run_everywhere(request, in, KernelKind::kEfficient);
        const bool whole = ranks == 1 && request.pattern.kind == PatternSpec::Kind::kFull;
        EXPECT_EQ(run.backward[0].peak_result_elements == 0, whole) << pattern << ranks;
        if (ranks == 1) {
          EXPECT_EQ(run.backward[0].peak_grad_elements, 2 * 2 * 96 * 2 * 16);
        }
        EXPECT_TRUE(as_exact(run.result, testing::expected_of(request, in), type)) << pattern << ranks;
      }
    }
  }
}

}  // namespace
}  // namespace annulus::composed_kernel_test
