// Tests of what attention draws and selects, over many ranks and with every kernel for CPUs: the random blocks of
// bigbird, the blocks of adaptive maps, and dropout, forward and backward. The oracle makes all of these by itself from
// the definitions, so that a mistake in a map or a draw is not in both results.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>

#include "attention/dropout/dropout.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/oracle/oracle.h"
#include "attention/plan/plan.h"
#include "attention/testing/any_request.h"
#include "tests/attention/execution/run_everywhere.h"
#include "tests/common/exactness.h"

namespace annulus::drawn_test {
namespace {

using testing::Inputs;

// More than the magnitudes that are added up to any result here: at most some hundred products of normal numbers, which
// dropout multiplies by up to 10. A wrong draw changes results by far more than a rounding of this.
constexpr double kTerms = 1000;

void expect_the_oracles_result(const PlanRequest& request, KernelKind kernel, const Dropout& dropout) {
  RC_LOG() << request.text() << ", " << to_string(kernel) << ", dropout " << dropout.rate << ", seed " << dropout.seed
           << "\n";
  const Inputs in = testing::random_inputs(request.shape, 8, at::kDouble);
  const OracleResult got = testing::run_everywhere(request, in, kernel, {}, {}, dropout).result;
  const OracleResult want = testing::oracle_of(request, in, {}, dropout);
  for (at::Tensor OracleResult::*const result :
       {&OracleResult::out, &OracleResult::lse, &OracleResult::dq, &OracleResult::dk, &OracleResult::dv}) {
    const ::testing::AssertionResult exact = testing::agrees(got.*result, want.*result, kTerms);
    RC_LOG() << exact.message() << "\n";
    RC_ASSERT(static_cast<bool>(exact));
  }
}

KernelKind any_kernel() { return *rc::gen::element(KernelKind::kCpu, KernelKind::kEfficient, KernelKind::kReference); }

RC_GTEST_PROP(Drawn, DropoutEqualsTheOracle, ()) {
  const PlanRequest request = testing::any_request();
  const Dropout dropout{.rate = *rc::gen::element(0.1, 0.5, 0.9),
                        .seed = *rc::gen::arbitrary<uint64_t>(),
                        .step = *rc::gen::inRange<int64_t>(0, 1000),
                        .layer = *rc::gen::inRange<int64_t>(0, 100),
                        .first_row = *rc::gen::inRange<int64_t>(0, 1000)};
  expect_the_oracles_result(request, any_kernel(), dropout);
}

// Blocks of 16 positions, of which bigbird draws some and an adaptive map selects some.
RC_GTEST_PROP(Drawn, DrawnAndSelectedBlocksEqualTheOracle, ()) {
  AttentionShape shape = testing::any_shape();
  shape.query_offset = 16 * *rc::gen::element<int64_t>(0, 0, -1, 2);
  PlanRequest request = testing::any_request(shape);
  const auto number = [](int64_t least, int64_t most) {
    return std::to_string(*rc::gen::inRange<int64_t>(least, most + 1));
  };
  std::string map =
      *rc::gen::arbitrary<bool>()
          ? "\"bigbird\", window_blocks = 0, global_blocks = " + number(0, 1) + ", random_blocks = " + number(1, 3) +
                ", seed = " + number(-1000, 1000) + (*rc::gen::arbitrary<bool>() ? ", per_head = false" : "")
          : "\"adaptive\", keep = " + number(1, 4) + (*rc::gen::arbitrary<bool>() ? ", query = \"first\"" : "");
  std::string text = "{ kind = \"blocks\", block = 16, map = " + map;
  if (*rc::gen::arbitrary<bool>()) text += ", causal = true";
  text += " }";
  if (*rc::gen::inRange(0, 4) == 0)
    text = "{ kind = \"union\", causal = true, of = [{ kind = \"causal\" }, " + text + "] }";
  request.pattern = parse_pattern(text, "test");
  expect_the_oracles_result(request, any_kernel(), {});
}

}  // namespace
}  // namespace annulus::drawn_test
