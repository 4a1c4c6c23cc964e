// Tests of the rule for spikes of the gradient norm (runtime/training/state/spike_rule.h) and of the count of updates
// left out (runtime/training/state/left_out.h).
#include "runtime/training/state/spike_rule.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "common/error.h"
#include "runtime/training/state/left_out.h"
#include "tests/common/expect_error.h"

namespace annulus::spike_rule_test {
namespace {

TEST(SpikeRule, ComparesWithTheMedianOfRecentNorms) {
  SpikeRule rule(2, 3);
  for (const double norm : {5.0, 1.0}) {
    EXPECT_EQ(rule.median(), std::nullopt);
    EXPECT_FALSE(rule.is_spike(1e9)) << "too few norms to judge by";
    rule.applied(norm);
  }
  rule.applied(3);
  EXPECT_EQ(rule.median(), 3.0);
  EXPECT_FALSE(rule.is_spike(6));
  EXPECT_TRUE(rule.is_spike(6.001));
  rule.applied(4);  // the 5 is gone
  EXPECT_EQ(rule.median(), 3.0);
  rule.applied(9);
  EXPECT_EQ(rule.median(), 4.0);
  SpikeRule even(2, 2);
  even.applied(1);
  even.applied(2);
  EXPECT_EQ(even.median(), 1.5);
}

TEST(SpikeRule, IsOffWithoutAFactor) {
  SpikeRule rule(0, 1);
  rule.applied(1);
  EXPECT_EQ(rule.median(), std::nullopt);
  EXPECT_FALSE(rule.is_spike(1e9));
  EXPECT_EQ(rule.text(), "");
}

TEST(SpikeRule, RestoresItsState) {
  SpikeRule rule(2, 3);
  for (const double norm : {0.1, 1.0 / 3, 2.0 / 7, 1e-17}) rule.applied(norm);
  rule.left_out();
  SpikeRule same(2, 3);
  same.restore(rule.text());
  EXPECT_EQ(same.text(), rule.text());
  EXPECT_EQ(same.median(), rule.median());
  EXPECT_EQ(same.spikes(), 1);
  SpikeRule shorter(2, 1);
  shorter.restore(rule.text());
  EXPECT_EQ(shorter.median(), 1e-17) << "the newest of them";
  same.restore("");
  EXPECT_EQ(same.median(), std::nullopt);
  EXPECT_EQ(same.spikes(), 0);
  for (const std::string damaged : {"x", "{}", "{\"norms\":[-1],\"spikes\":0}", "{\"norms\":[null],\"spikes\":0}"}) {
    EXPECT_THROW(rule.restore(damaged), Error) << damaged;
  }
  EXPECT_EQ(rule.spikes(), 1);
}

TEST(LeftOut, EndsTheRunAfterTooManyInARow) {
  LeftOut out(3);
  for (int64_t step = 0; step < 20; step += 2) {
    out.add(step, LeftOut::Reason::kSpike);
    out.applied(step + 1);
  }
  out.add(20, LeftOut::Reason::kNotFinite);
  out.add(21, LeftOut::Reason::kSpike);
  expect_error(ErrorKind::kUsage,
               {"above optimizer.spike times its running median in 3 steps in a row, the last at step 23"},
               [&] { out.add(22, LeftOut::Reason::kSpike); });
}

// Otherwise a run that meets a spike at the same step after every rewind would never end.
TEST(LeftOut, RepeatedStepsDoNotResetTheCount) {
  LeftOut out(3);
  const auto return_to = [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) out.applied(step);
  };
  return_to(0, 8);
  out.add(8, LeftOut::Reason::kSpike);
  return_to(4, 8);
  out.add(8, LeftOut::Reason::kSpike);
  return_to(4, 9);  // it gets past the place
  out.add(9, LeftOut::Reason::kSpike);
  return_to(4, 9);
  out.add(9, LeftOut::Reason::kSpike);
  return_to(4, 9);
  EXPECT_THROW(out.add(9, LeftOut::Reason::kSpike), Error);
}

}  // namespace
}  // namespace annulus::spike_rule_test
