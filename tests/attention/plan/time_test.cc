// Tests of the predicted time of plans: the sweep over hand-made steps with exact seconds, what a step of a program
// costs, the bytes of each kind of row, and that a slower machine never makes a plan faster.
#include "attention/plan/time.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "attention/plan/traffic.h"
#include "attention/testing/any_request.h"

namespace annulus::time_test {
namespace {

// Links and rates that are powers of two, so that sums are exact: a pair takes 1/8 s forward and 1/4 s backward at head
// size 1, a byte 1/16 s inside a host and 1/4 s between hosts.
MachineProfile machine(bool overlap, int ranks_per_host = 0) {
  MachineProfile m;
  m.name = "test";
  m.source = "a test";
  m.overlap = overlap;
  m.ranks_per_host = ranks_per_host;
  m.copy = 64;
  m.inside = {.latency = 0.5, .message = 0.25, .bandwidth = 16, .shared_by = 1};
  m.between = {.latency = 2, .message = 0.25, .bandwidth = 4, .shared_by = 1};
  m.fp32 = KernelRates{{.call = 1, .tile = 0.5, .rows = {1}, .keys = {1}, .rates = {{8}}},
                       {.call = 1, .tile = 0.5, .rows = {1}, .keys = {1}, .rates = {{4}}}};
  return m;
}

StepCost step(double compute, std::vector<StepCost::Part> sends, std::vector<StepCost::Part> receives, double add = 0) {
  return {.compute = compute, .add = add, .sends = std::move(sends), .receives = std::move(receives)};
}

// Two ranks exchange 32 bytes in their first step: 32 / 16 + 0.25 + 0.5 = 2.75 s.
std::vector<RankSteps> exchange(double first, double second) {
  return {{0, {step(first, {{1, 32}}, {{1, 32}}), step(1, {}, {})}},
          {1, {step(second, {{0, 32}}, {{0, 32}}), step(1, {}, {}, 0.5)}}};
}

TEST(Time, AnOverlappedTransferCostsOnlyWhatNoComputationHides) {
  const std::vector<RankTime> hidden = sweep(exchange(4, 4), 2, machine(true));
  EXPECT_EQ(hidden[0].seconds, 5);
  EXPECT_EQ(hidden[0].exposed, 0);
  EXPECT_EQ(hidden[1].seconds, 5.5);  // with its addition
  EXPECT_EQ(hidden[1].add, 0.5);
  const std::vector<RankTime> shown = sweep(exchange(1, 1), 2, machine(true));
  EXPECT_EQ(shown[0].seconds, 3.75);
  EXPECT_EQ(shown[0].exposed, 1.75);
  EXPECT_EQ(shown[0].latency, 0);  // 0.5 s of latency are hidden by 1 s of computation
  EXPECT_EQ(shown[0].busy, 4.5);
  EXPECT_EQ(shown[0].bytes, 32);
  EXPECT_EQ(slowest(shown).seconds, 4.25);
}

TEST(Time, ClocksAreThoseOfTheSweep) {
  std::vector<std::vector<StepClock>> clocks;
  sweep(exchange(1, 1), 2, machine(true), &clocks);
  ASSERT_EQ(clocks.size(), 2U);
  ASSERT_EQ(clocks[1].size(), 2U);
  const StepClock& first = clocks[1][0];
  EXPECT_EQ(first.begin, 0);
  EXPECT_EQ(first.computed, 1);
  EXPECT_EQ(first.sent_from, 0);
  EXPECT_EQ(first.sent, 2.75);
  EXPECT_EQ(first.received, 2.75);
  EXPECT_EQ(first.waited, 2.75);
  EXPECT_EQ(first.end, 2.75);
  const StepClock& second = clocks[1][1];
  EXPECT_EQ(second.begin, 2.75);
  EXPECT_EQ(second.computed, 3.75);
  EXPECT_EQ(second.sent, 0);
  EXPECT_EQ(second.waited, 3.75);
  EXPECT_EQ(second.end, 4.25) << "with its addition";
  // Without overlap transfers begin when both ranks have computed.
  sweep(exchange(1, 4), 2, machine(false), &clocks);
  EXPECT_EQ(clocks[0][0].computed, 1);
  EXPECT_EQ(clocks[0][0].sent_from, 4);
  EXPECT_EQ(clocks[0][0].received, 4 + 2 * 2.25 + 0.5);
}

TEST(Time, WithoutOverlapACoreDoesBothEndsAfterItsTiles) {
  const std::vector<RankTime> times = sweep(exchange(1, 1), 2, machine(false));
  EXPECT_EQ(times[0].seconds, 1 + 2 * 2.25 + 0.5 + 1);
  EXPECT_EQ(times[0].exposed, 5);
  EXPECT_EQ(times[0].latency, 0.5);
}

TEST(Time, ATransferWaitsForBothItsEnds) {
  // Without overlap rank 0 waits until rank 1 has computed for 3 s.
  const std::vector<RankTime> times = sweep(exchange(1, 3), 2, machine(false));
  EXPECT_EQ(times[0].seconds, 3 + 2 * 2.25 + 0.5 + 1);
  EXPECT_EQ(times[0].exposed, 7);
  EXPECT_EQ(times[0].latency, 2.5);
  // With overlap a rank that begins its second step late delays the one that receives from it then.
  const std::vector<RankSteps> late = {{0, {step(1, {}, {}), step(1, {}, {{1, 16}})}},
                                       {1, {step(4, {}, {}), step(1, {{0, 16}}, {})}}};
  EXPECT_EQ(sweep(late, 2, machine(true))[0].seconds, 4 + 1 + 0.25 + 0.5);
  // A rank that is not known is assumed to be there.
  EXPECT_EQ(sweep({late[0]}, 2, machine(true))[0].seconds, 1 + 1 + 0.25 + 0.5);
}

TEST(Time, LinksInsideAndBetweenHostsWorkAtTheSameTime) {
  const MachineProfile hosts = machine(true, 2);
  const std::vector<RankSteps> one = {{1, {step(0, {{0, 16}, {2, 16}}, {})}}};
  EXPECT_EQ(sweep(one, 4, hosts)[0].seconds, std::max(1 + 0.25 + 0.5, 4 + 0.25 + 2));
  const std::vector<RankSteps> two = {{1, {step(0, {{2, 16}, {3, 16}}, {})}}};  // one after the other
  EXPECT_EQ(sweep(two, 4, hosts)[0].seconds, 2 * (4 + 0.25) + 2);
}

TEST(Time, RanksThatShareANicShareItsBandwidth) {
  MachineProfile hosts = machine(true, 2);
  hosts.between.shared_by = 2;
  const RankSteps zero{0, {step(0, {{2, 16}}, {})}}, one{1, {step(0, {{3, 16}}, {})}}, idle{1, {step(0, {}, {})}};
  EXPECT_EQ(sweep({zero, one}, 4, hosts)[0].seconds, 8 + 0.25 + 2);
  EXPECT_EQ(sweep({zero, idle}, 4, hosts)[0].seconds, 4 + 0.25 + 2);
  EXPECT_EQ(sweep({zero}, 4, hosts)[0].seconds, 8 + 0.25 + 2);  // the other rank may use it, too
}

TEST(Time, RowsHaveTheBytesOfTheirKind) {
  const RowBytes half{64, 2}, wide{64, 8};
  EXPECT_EQ(half.of(BufferKind::kKV, false), 2 * 64 * 2);
  EXPECT_EQ(half.of(BufferKind::kGrad, true), 2 * 64 * 4);
  EXPECT_EQ(half.of(BufferKind::kQueries, false), 64 * 2);
  EXPECT_EQ(half.of(BufferKind::kQueries, true), 3 * 64 * 2 + 4);
  EXPECT_EQ(half.of(BufferKind::kResults, false), 64 * 4 + 4);
  EXPECT_EQ(half.of(BufferKind::kResults, true), 64 * 4);
  EXPECT_EQ(wide.of(BufferKind::kGrad, true), 2 * 64 * 8);
  EXPECT_EQ(wide.of(BufferKind::kResults, false), 64 * 8 + 8);
}

// A causal ring of two ranks with two positions each: the counted pairs, tiles, calls and bytes by hand.
TEST(Time, AStepCostsItsPairsCallsTilesAndBytes) {
  PlanRequest request;
  request.shape = {1, 1, 1, 4, 4, 0};
  request.pattern = causal_pattern();
  request.schedule = ScheduleKind::kRing;
  request.ranks = 2;
  const RowBytes bytes{1, 4};
  const std::vector<StepCost> owner = step_costs(make_program(request, 0), false, machine(true), bytes);
  ASSERT_EQ(owner.size(), 2u);
  EXPECT_EQ(owner[0].compute, 1 + 0.5 + 3.0 / 8);
  EXPECT_EQ(owner[0].sends, (std::vector<StepCost::Part>{{1, 2 * 2 * 4}}));
  EXPECT_EQ(owner[1].compute, 0);
  const std::vector<StepCost> reader = step_costs(make_program(request, 1), false, machine(true), bytes);
  EXPECT_EQ(reader[0].receives, (std::vector<StepCost::Part>{{0, 2 * 2 * 4}}));
  EXPECT_EQ(reader[1].compute, 1 + 0.5 + 4.0 / 8);
  // The diagonal cuts both queries of the first tile: 2 x 0.25 pairs more, but never more than there are.
  MachineProfile coarse = machine(true);
  coarse.fp32->forward.edge = 0.25;
  const Program program = make_program(request, 1);
  EXPECT_EQ(step_costs(program, false, coarse, bytes)[0].compute, 1 + 0.5 + 3.5 / 8);
  EXPECT_EQ(step_costs(program, false, coarse, bytes)[1].compute, 1 + 0.5 + 4.0 / 8);
  coarse.fp32->forward.edge = 100;
  EXPECT_EQ(step_costs(program, false, coarse, bytes)[0].compute, 1 + 0.5 + 4.0 / 8);
  double adds = 0;
  for (const StepCost& cost : step_costs(make_program(request, 0), true, machine(true), bytes)) adds += cost.add;
  // The gradients of two rows come home. Of each query q, out, dout, dq and its sum pass, and lse; of each key dk and
  // dv and their sums.
  EXPECT_EQ(adds, (2 * 2 * 4 + 2 * (5 * 4 + 4) + 2 * 4 * 4) / 64.0);
}

std::vector<RankTime> times_of(const PlanRequest& request, bool backward, const MachineProfile& m) {
  std::vector<RankSteps> all;
  for (const Program& program : make_programs(request)) {
    all.push_back({program.rank, step_costs(program, backward, m, {16, 4})});
  }
  return sweep(all, request.ranks, m);
}

RC_GTEST_PROP(Time, SlowerMachinesAreNeverFaster, ()) {
  PlanRequest request = testing::any_request();
  if (request.schedule == ScheduleKind::kAuto) request.schedule = ScheduleKind::kRing, request.within = 0;
  const bool backward = *rc::gen::arbitrary<bool>();
  MachineProfile fast = built_in_machine(*rc::gen::element<std::string>("h100", "cpu"));
  fast.ranks_per_host = *rc::gen::inRange(0, 5);
  fast.between.shared_by = *rc::gen::inRange(1, 4);
  MachineProfile slow = fast;
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      slow.inside.bandwidth /= 3;
      break;
    case 1:
      slow.between.bandwidth /= 3;
      break;
    case 2:
      slow.inside.latency *= 3, slow.between.message *= 3;
      break;
    default:
      slow.copy /= 3;
  }
  const std::vector<RankTime> a = times_of(request, backward, fast), b = times_of(request, backward, slow);
  for (size_t r = 0; r < a.size(); ++r) {
    RC_ASSERT(b[r].seconds >= a[r].seconds);
    const double sum = a[r].compute + a[r].add + a[r].exposed;
    RC_ASSERT(std::abs(sum - a[r].seconds) <= 1e-9 * sum);
    RC_ASSERT(a[r].latency <= a[r].exposed);
  }
}

// Bytes sent are those that the plan counts (traffic.h).
RC_GTEST_PROP(Time, CountsTheBytesOfThePlan, ()) {
  PlanRequest request = testing::any_request();
  if (request.schedule == ScheduleKind::kAuto) request.schedule = ScheduleKind::kGroupCast;
  const MachineProfile m = built_in_machine("cpu");
  for (const bool backward : {false, true}) {
    const std::vector<RankTime> times = times_of(request, backward, m);
    for (const Program& program : make_programs(request)) {
      const Traffic sum = traffic(program, backward ? program.backward : program.forward);
      RC_ASSERT(times[static_cast<size_t>(program.rank)].bytes == static_cast<double>(sum.bytes(16, 4, 4)));
    }
  }
}

}  // namespace
}  // namespace annulus::time_test
