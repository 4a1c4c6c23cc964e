// Tests that the bytes which a call sends, and the largest storage which it holds at once, are those of its plan.
#include "attention/plan/traffic.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "attention/execution/planned_call.h"
#include "tests/attention/execution/run_everywhere.h"

namespace annulus::traffic_test {
namespace {

using testing::random_inputs;
using testing::RankResults;
using testing::run_everywhere;

PlanRequest request_of(const char* pattern, int ranks, int64_t length, LayoutKind layout, ScheduleKind schedule,
                       int within = 0) {
  PlanRequest request;
  request.shape = {1, 4, 2, length, length, 0};
  request.pattern = parse_pattern(pattern, "test");
  request.layout = layout;
  request.schedule = schedule;
  request.ranks = ranks;
  request.within = within;
  return request;
}

constexpr int64_t kDim = 16;

// Compares the counts of every rank, for fp32 inputs, with those of its program.
RankResults expect_as_planned(const PlanRequest& request, bool lending = true) {
  if (lending) expect_as_planned(request, false);
  RankResults run =
      run_everywhere(request, random_inputs(request.shape, kDim, at::kFloat), KernelKind::kAuto, {}, lending);
  for (int r = 0; r < request.ranks; ++r) {
    const Program program = make_program(request, r);
    const Traffic f = traffic(program, program.forward), b = traffic(program, program.backward);
    const AttentionStats &fs = run.forward[static_cast<size_t>(r)], &bs = run.backward[static_cast<size_t>(r)];
    const std::string where = request.text() + ", rank " + std::to_string(r);
    EXPECT_EQ(fs.bytes_sent, f.bytes(kDim, 4, 4)) << where;
    EXPECT_EQ(fs.messages_sent, f.messages()) << where;
    EXPECT_EQ(bs.bytes_sent, b.bytes(kDim, 4, 4)) << where;
    EXPECT_EQ(bs.messages_sent, b.messages()) << where;
    EXPECT_EQ(fs.peak_kv_elements, f.peak_kv_rows * kDim) << where;
    EXPECT_EQ(fs.peak_grad_elements, 0) << where;
    EXPECT_EQ(bs.peak_kv_elements, b.peak_kv_rows * kDim) << where;
    EXPECT_EQ(bs.peak_grad_elements, b.peak_grad_rows * kDim) << where;
  }
  return run;
}

constexpr ScheduleKind kSchedules[] = {ScheduleKind::kRing, ScheduleKind::kAllGather, ScheduleKind::kGroupCast};

TEST(Traffic, BytesAndPeaksAreThoseOfThePlan) {
  for (const ScheduleKind schedule : kSchedules) {
    for (const int ranks : {2, 3, 4, 8}) {
      const RankResults run =
          expect_as_planned(request_of("{ kind = \"causal\" }", ranks, 96, LayoutKind::kZigzag, schedule));
      const int64_t block = 2 * 96 / ranks * 2 * kDim;  // K and V elements of one rank
      for (size_t r = 0; r < static_cast<size_t>(ranks); ++r) {
        EXPECT_LE(run.backward[r].peak_result_elements, block);
        if (schedule != ScheduleKind::kRing) continue;
        EXPECT_LE(run.forward[r].peak_kv_elements, 3 * block);
        EXPECT_LE(run.backward[r].peak_kv_elements, 3 * block);
        EXPECT_LE(run.backward[r].peak_grad_elements, 3 * block);
      }
    }
  }
}

TEST(Traffic, BetweenGroupsItIsThatOfThePlan) {
  for (const ScheduleKind schedule : {ScheduleKind::kDoubleRing, ScheduleKind::kGroupCast}) {
    for (const auto& [ranks, within] : {std::pair{4, 2}, {6, 3}, {6, 2}, {4, 1}}) {
      for (const char* pattern : {"{ kind = \"full\" }", "{ kind = \"window\", left = 20, right = 0 }"}) {
        expect_as_planned(request_of(pattern, ranks, 96, LayoutKind::kZigzag, schedule, within));
      }
    }
  }
}

// Every block is lent, with the same results as copied ones and the same traffic and storage as planned.
TEST(Traffic, RanksOfAHostLendTheirBlocks) {
  for (const ScheduleKind schedule : kSchedules) {
    for (const char* pattern :
         {"{ kind = \"causal\" }", "{ kind = \"dilated\", segment_lengths = [32, 96], dilation_rates = [2, 3] }"}) {
      const PlanRequest request = request_of(pattern, 4, 96, LayoutKind::kZigzag, schedule);
      const auto inputs = random_inputs(request.shape, kDim, at::kFloat);
      const RankResults lent = run_everywhere(request, inputs, KernelKind::kAuto, {}, /*lending=*/true);
      const RankResults copied = run_everywhere(request, inputs, KernelKind::kAuto, {}, /*lending=*/false);
      for (size_t r = 0; r < 4; ++r) {
        for (const auto direction : {&RankResults::forward, &RankResults::backward}) {
          const AttentionStats &l = (lent.*direction)[r], &c = (copied.*direction)[r];
          EXPECT_EQ(l.bytes_lent, l.bytes_sent) << request.text();
          EXPECT_EQ(c.bytes_lent, 0);
          EXPECT_EQ(l.bytes_sent, c.bytes_sent);
          EXPECT_EQ(l.peak_kv_elements, c.peak_kv_elements);
          EXPECT_EQ(l.peak_grad_elements, c.peak_grad_elements);
        }
      }
      EXPECT_TRUE(at::equal(lent.result.out, copied.result.out));
      EXPECT_TRUE(at::equal(lent.result.dq, copied.result.dq));
      EXPECT_TRUE(at::equal(lent.result.dk, copied.result.dk));
      EXPECT_TRUE(at::equal(lent.result.dv, copied.result.dv));
    }
  }
}

// Buffers have different sizes, so that none can take over the storage of another. Their storage is freed and not kept
// for later buffers.
TEST(Traffic, UnevenBuffersAreFreedAsPlanned) {
  for (const ScheduleKind schedule : kSchedules) {
    PlanRequest uneven = request_of("{ kind = \"full\" }", 8, 96, LayoutKind::kContiguous, schedule);
    uneven.uneven_lengths = {3, 30, 5, 1, 22, 9, 0, 26};
    expect_as_planned(uneven);
  }
  for (const ScheduleKind schedule : {ScheduleKind::kDoubleRing, ScheduleKind::kGroupCast}) {
    PlanRequest uneven = request_of("{ kind = \"full\" }", 8, 96, LayoutKind::kContiguous, schedule, 4);
    uneven.uneven_lengths = {3, 30, 5, 1, 22, 9, 0, 26};
    expect_as_planned(uneven);
  }
}

// Rows that are not contiguous are copied before they are sent, and the copies count.
TEST(Traffic, CopiesOfScatteredRowsAreCounted) {
  for (const ScheduleKind schedule : {ScheduleKind::kRing, ScheduleKind::kGroupCast}) {
    const PlanRequest request =
        request_of("{ kind = \"dilated\", segment_lengths = [32, 96], dilation_rates = [2, 3] }", 6, 96,
                   LayoutKind::kContiguous, schedule);
    expect_as_planned(request);
    int64_t copies = 0;
    for (int r = 0; r < request.ranks; ++r) {
      const Program program = make_program(request, r);
      copies += static_cast<int64_t>(storage_of(program, program.forward).buffers().size() - program.buffers.size());
    }
    EXPECT_GT(copies, 0) << request.text();
  }
}

}  // namespace
}  // namespace annulus::traffic_test
