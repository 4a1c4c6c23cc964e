// Tests benchmarks/gpu/simulated_ring.h: the work of all ranks, run one after another, equals the oracle's result for
// the whole problem.
#include "benchmarks/gpu/simulated_ring.h"

#include <gtest/gtest.h>

#include <string>

#include "common/error.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::simulated_ring_test {
namespace {

using testing::as_exact;
using testing::expected_of;
using testing::Inputs;
using testing::random_inputs;

PlanRequest request_of(const char* pattern, int ranks, LayoutKind layout, ScheduleKind schedule) {
  PlanRequest request;
  request.shape = {2, 4, 2, 96, 96, 0};
  request.pattern = parse_pattern(pattern, "test");
  request.ranks = ranks;
  request.layout = layout;
  request.schedule = schedule;
  return request;
}

void expect_exact(const PlanRequest& request, at::ScalarType type) {
  const Inputs in = random_inputs(request.shape, 16, type);
  SimulatedRing ring(request, in.q, in.k, in.v, in.dout, KernelKind::kAuto);
  for (int turn = 0; turn < 2; ++turn) {  // the second turn must not see results of the first
    ring.forward();
    ring.backward();
  }
  const SimulatedRing::Result got = ring.result();
  EXPECT_TRUE(as_exact({got.out, got.lse, got.dq, got.dk, got.dv}, expected_of(request, in), type)) << request.text();
}

TEST(SimulatedRing, MatchesTheOracle) {
  for (const char* const pattern :
       {"{ kind = \"causal\" }", "{ kind = \"full\" }", "{ kind = \"window\", left = 20, right = 0 }",
        "{ kind = \"dilated\", segment_lengths = [16, 48], dilation_rates = [1, 3] }",
        "{ kind = \"blocks\", map = \"bigbird\", block = 16, window_blocks = 0, global_blocks = 1, random_blocks = 1 "
        "}"}) {
    for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast}) {
      for (const LayoutKind layout : {LayoutKind::kZigzag, LayoutKind::kStriped}) {
        expect_exact(request_of(pattern, 4, layout, schedule), at::kDouble);
      }
    }
  }
}

TEST(SimulatedRing, MatchesTheOracleForAnyNumberOfRanks) {
  for (const int ranks : {1, 2, 3, 8}) {
    expect_exact(request_of("{ kind = \"causal\" }", ranks, LayoutKind::kZigzag, ScheduleKind::kRing), at::kFloat);
  }
  expect_exact(request_of("{ kind = \"causal\" }", 8, LayoutKind::kZigzag, ScheduleKind::kRing), at::kBFloat16);
}

TEST(SimulatedRing, RefusesTensorsOfAnotherShape) {
  const PlanRequest request = request_of("{ kind = \"full\" }", 2, LayoutKind::kZigzag, ScheduleKind::kRing);
  const Inputs in = random_inputs(request.shape, 16, at::kFloat);
  EXPECT_THROW(SimulatedRing(request, in.q.narrow(1, 0, 48), in.k, in.v, in.dout, KernelKind::kAuto), Error);
}

}  // namespace
}  // namespace annulus::simulated_ring_test
