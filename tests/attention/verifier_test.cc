// The verifier against brute-force counting, and against planted mistakes.
#include "attention/plan/verifier.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>

#include "attention/oracle/oracle.h"
#include "attention/plan/schedules.h"
#include "common/error.h"
#include "tests/attention/any_request.h"

namespace annulus {
namespace {

RC_GTEST_PROP(Verifier, ProvesRightPlansAndCountsTheirPairs, ()) {
  const PlanRequest request = testing::any_request();
  const Proof proof = verify(request);
  RC_ASSERT(proof.faults == std::vector<std::string>{});
  const auto count = count_of(request.pattern, request.shape);
  const AttentionShape& shape = request.shape;
  int64_t pairs = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t i = 0; i < shape.q_len; ++i) {
        for (int64_t j = 0; j < shape.k_len; ++j) pairs += count(b, h, i, j);
      }
    }
  }
  RC_ASSERT(proof.pairs == pairs);
}

std::vector<Program> programs_of(const PlanRequest& request) {
  std::vector<Program> programs;
  for (int r = 0; r < request.ranks; ++r) programs.push_back(make_program(request, r));
  return programs;
}

PlanRequest ring_of_four() {
  PlanRequest request;
  request.shape = {1, 2, 1, 64, 64, 0};
  request.pattern.causal = true;
  request.layout = LayoutKind::kZigzag;
  request.ranks = 4;
  return request;
}

struct Mistake {
  const char* name;
  ScheduleKind schedule;
  std::function<void(std::vector<Program>&)> plant;
  const char* finding;
};

class PlantedMistake : public ::testing::TestWithParam<Mistake> {};

TEST_P(PlantedMistake, IsFound) {
  PlanRequest request = ring_of_four();
  request.schedule = GetParam().schedule;
  std::vector<Program> programs = programs_of(request);
  ASSERT_TRUE(verify(programs).holds());
  GetParam().plant(programs);
  const Proof proof = verify(programs);
  ASSERT_FALSE(proof.holds()) << GetParam().name;
  std::string all;
  for (const std::string& fault : proof.faults) all += fault + "\n";
  EXPECT_NE(all.find(GetParam().finding), std::string::npos) << all;
}

INSTANTIATE_TEST_SUITE_P(
    Each, PlantedMistake,
    ::testing::Values(Mistake{"DroppedTile", ScheduleKind::kRing, [](auto& p) { p[1].forward[2].tiles.pop_back(); },
                              "rank 1, forward: its tiles are not the pattern's pairs"},
                      Mistake{"DoubledTile", ScheduleKind::kRing,
                              [](auto& p) { p[2].forward[1].tiles.push_back(p[2].forward[1].tiles[0]); },
                              "rank 2, forward: its tiles are not the pattern's pairs"},
                      Mistake{"DroppedTileInBackward", ScheduleKind::kRing,
                              [](auto& p) { p[1].backward[2].tiles.pop_back(); }, "rank 1, backward: its tiles"},
                      Mistake{"WiderBand", ScheduleKind::kRing,
                              [](auto& p) {
                                for (Tile& t : p[0].forward[0].tiles) t.band.hi += t.band.hi < 100 ? 1 : 0;
                              },
                              "rank 0, forward: its tiles are not the pattern's pairs"},
                      Mistake{"OtherHeads", ScheduleKind::kRing,
                              [](auto& p) {
                                p[0].forward[0].tiles[0].heads = {0, 1, 1};
                              },
                              "rank 0, forward: its tiles are not the pattern's pairs"},
                      Mistake{"WrongRows", ScheduleKind::kRing,
                              [](auto& p) { p[3].forward[1].tiles[0].key_rows.begin += 1; }, "stored elsewhere"},
                      Mistake{"MissingReceive", ScheduleKind::kRing, [](auto& p) { p[2].forward[2].receives.clear(); },
                              "has no receive"},
                      Mistake{"MissingSend", ScheduleKind::kAllGather,
                              [](auto& p) { p[2].forward[0].sends.pop_back(); }, "has no send"},
                      Mistake{"ReceiveTooLate", ScheduleKind::kRing,
                              [](auto& p) {
                                auto &early = p[2].forward[0].receives, &late = p[2].forward[1].receives;
                                late.insert(late.begin(), early[0]);
                                early.clear();
                              },
                              "before it is filled"},
                      Mistake{"OverwrittenBuffer", ScheduleKind::kAllGather,
                              [](auto& p) {
                                // One receive buffer for two blocks: the second overwrites, the first is lost.
                                auto& receives = p[0].backward[2].receives;
                                receives[1].buffer = receives[0].buffer;
                              },
                              "two transfers arrive in buffer"},
                      Mistake{"OverwrittenWhileInUse", ScheduleKind::kRing,
                              [](auto& p) {
                                Step& step = p[0].backward[2];
                                step.receives[0].buffer = step.zero[0];
                              },
                              "while it travels"},
                      Mistake{"ReadWhileArriving", ScheduleKind::kRing,
                              [](auto& p) {
                                Step &early = p[1].forward[0], &late = p[1].forward[1];
                                early.tiles.insert(early.tiles.end(), late.tiles.begin(), late.tiles.end());
                                late.tiles.clear();
                              },
                              "before it is filled"},
                      Mistake{"LostGradient", ScheduleKind::kRing, [](auto& p) { p[3].backward[2].adds.clear(); },
                              "lost or counted twice"},
                      Mistake{"GradientAddedTwice", ScheduleKind::kAllGather,
                              [](auto& p) { p[3].backward[2].adds.push_back(p[3].backward[2].adds[0]); },
                              "lost or counted twice"},
                      Mistake{"GradientZeroedAgain", ScheduleKind::kAllGather,
                              [](auto& p) { p[0].backward[1].zero.push_back(1); }, "throws away the gradients"},
                      Mistake{"Deadlock", ScheduleKind::kRing,
                              [](auto& p) {
                                // Ranks 0 and 1 each wait for a transfer that the other makes only in its next step.
                                Program &a = p[0], &b = p[1];
                                const RowSet empty = a.buffers[0].rows;
                                const RowSet other = b.buffers[0].rows;
                                a.buffers.push_back({BufferKind::kKV, other});
                                b.buffers.push_back({BufferKind::kKV, empty});
                                const int in_a = static_cast<int>(a.buffers.size()) - 1;
                                const int in_b = static_cast<int>(b.buffers.size()) - 1;
                                a.forward[2].receives.push_back({1, in_a, other});
                                a.forward[3].sends.push_back({1, 0, empty});
                                b.forward[2].receives.push_back({0, in_b, empty});
                                b.forward[3].sends.push_back({0, 0, other});
                              },
                              "deadlock"},
                      Mistake{"TwoOwners", ScheduleKind::kRing, [](auto& p) { p[0].key_spans = p[1].key_spans; },
                              "another rank owns"}),
    [](const auto& info) { return info.param.name; });

TEST(Verifier, RefusesProgramsOfDifferentPlans) {
  std::vector<Program> programs = programs_of(ring_of_four());
  programs[2].request.shape.q_len = 65;
  EXPECT_THROW(verify(programs), Error);
  programs.pop_back();
  EXPECT_THROW(verify(programs), Error);
}

TEST(Verifier, ProvesAMillionTokensOverSixtyFourRanks) {
  for (const LayoutKind layout : {LayoutKind::kZigzag, LayoutKind::kStriped}) {
    PlanRequest request;
    request.shape = {1, 8, 1, 1 << 20, 1 << 20, 0};
    request.pattern.causal = true;
    request.layout = layout;
    request.ranks = 64;
    const Proof proof = verify(request);
    EXPECT_TRUE(proof.holds()) << proof.faults[0];
    const int64_t S = 1 << 20;
    EXPECT_EQ(proof.pairs, 8 * (S * (S + 1) / 2));
  }
}

}  // namespace
}  // namespace annulus
