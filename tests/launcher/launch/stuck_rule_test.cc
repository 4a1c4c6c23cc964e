// Tests which ranks count as stuck, over what their hosts see of them each second.
#include "launcher/launch/stuck_rule.h"

#include <gtest/gtest.h>

#include <functional>
#include <optional>

namespace annulus::stuck_rule_test {
namespace {

RankGlance at_work(uint64_t own = 1) { return {.own = own, .expected = true}; }

// Shows the same glance each second, up to `most` times. Returns after how many the rule calls the rank stuck; 0: it
// does not.
int seconds_until_stuck(StuckRule& rule, const RankGlance& glance, int most) {
  for (int second = 1; second <= most; ++second) {
    if (rule.look(glance, 1)) return second;
  }
  return 0;
}

TEST(StuckRule, NamesARankThatStandsStill) {
  StuckRule rule(3);
  EXPECT_FALSE(rule.look(at_work(1), 1));
  EXPECT_FALSE(rule.look(at_work(2), 1));
  EXPECT_EQ(seconds_until_stuck(rule, at_work(2), 10), 3);
  EXPECT_EQ(rule.look(at_work(2), 1), 4);
  EXPECT_FALSE(rule.look(at_work(3), 1)) << "it goes on";
}

TEST(StuckRule, ProgressCountsFromTheFirstLook) {
  StuckRule rule(3);
  EXPECT_FALSE(rule.look(at_work(1), 100)) << "nothing is known of the time before";
  EXPECT_EQ(seconds_until_stuck(rule, at_work(1), 10), 3);
}

TEST(StuckRule, ARankThatWaitsForOthersIsNotTheCulprit) {
  StuckRule rule(3);
  RankGlance waiting = at_work();
  waiting.waits_for_ranks = true;
  EXPECT_EQ(seconds_until_stuck(rule, waiting, 1000), 0);
  // The end of the wait is progress; what follows is its own time.
  EXPECT_EQ(seconds_until_stuck(rule, at_work(2), 10), 4);
}

TEST(StuckRule, AStoppedProcessIsNamedWhateverItDoes) {
  for (const bool expected : {false, true}) {
    for (const bool waits : {false, true}) {
      StuckRule rule(3);
      const RankGlance before{.own = 5, .expected = expected, .waits_for_ranks = waits, .lasting = true};
      EXPECT_EQ(seconds_until_stuck(rule, before, 20), 0);
      RankGlance stopped = before;
      stopped.stopped = true;
      EXPECT_EQ(seconds_until_stuck(rule, stopped, 10), 3);
      EXPECT_FALSE(rule.look(before, 1)) << "it was continued";
      EXPECT_EQ(seconds_until_stuck(rule, stopped, 10), 3) << "the time before does not count";
    }
  }
}

TEST(StuckRule, NothingIsExpectedOutsideOfARun) {
  StuckRule rule(3);
  EXPECT_EQ(seconds_until_stuck(rule, {.own = 1}, 1000), 0);
}

TEST(StuckRule, PhasesThatLastHaveTenTimesAsLong) {
  StuckRule rule(3);
  RankGlance saving = at_work();
  saving.lasting = true;
  EXPECT_EQ(seconds_until_stuck(rule, saving, 100), 31);
  EXPECT_FALSE(rule.look(at_work(2), 1));
  EXPECT_EQ(seconds_until_stuck(rule, at_work(2), 100), 3) << "how long that phase took says nothing about others";
}

TEST(StuckRule, PiecesOfWorkThatHaveTakenLongMayTakeLongAgain) {
  StuckRule rule(3);
  rule.look(at_work(1), 1);
  rule.look(at_work(1), 2);  // not yet 3
  EXPECT_FALSE(rule.look(at_work(2), 1));
  EXPECT_EQ(seconds_until_stuck(rule, at_work(2), 100), 6) << "three times 2";
}

TEST(StuckRule, WaitsAndStopsDoNotMakeItPatient) {
  RankGlance stopped = at_work(), waiting = at_work();
  stopped.stopped = true;
  waiting.waits_for_ranks = true;
  for (const RankGlance& idle : {stopped, waiting}) {
    StuckRule rule(3);
    rule.look(idle, 1);
    rule.look(idle, 2.5);
    rule.look(at_work(2), 1);
    EXPECT_EQ(seconds_until_stuck(rule, at_work(2), 100), 3);
  }
}

TEST(StuckRule, OtherThreadsCountWhileTheMainOneWaitsForThem) {
  for (const bool waits : {false, true}) {
    StuckRule rule(3);
    std::optional<double> stuck;
    for (uint64_t others = 0; others < 20 && !stuck; ++others) {
      RankGlance now = at_work();
      now.others = others;
      now.waits = waits;
      stuck = rule.look(now, 1);
    }
    EXPECT_EQ(stuck.has_value(), !waits);
    RankGlance still = at_work();
    still.others = 19;
    still.waits = waits;
    EXPECT_NE(seconds_until_stuck(rule, still, 10), 0) << "they stand still as well";
  }
}

}  // namespace
}  // namespace annulus::stuck_rule_test
