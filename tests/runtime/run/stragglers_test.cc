// Tests of runtime/run/stragglers.h on synthetic and on recorded steps: who is named, when, and that noise names no
// one.
#include "runtime/run/stragglers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace annulus::stragglers_test {
namespace {

using Seconds = std::function<double(int64_t step, size_t rank)>;

std::vector<RankStep> equal_parts(const Seconds& seconds, int64_t step, size_t ranks) {
  std::vector<RankStep> of_ranks;
  for (size_t rank = 0; rank < ranks; ++rank) of_ranks.push_back({seconds(step, rank), 1, 1});
  return of_ranks;
}

struct Named {
  int64_t step = 0;
  Stragglers::Change change;
};

std::vector<Named> run(Stragglers& stragglers, size_t ranks, int64_t steps, const Seconds& seconds) {
  std::vector<Named> named;
  for (int64_t step = 1; step <= steps; ++step) {
    for (const Stragglers::Change& change : stragglers.add(step, equal_parts(seconds, step, ranks))) {
      named.push_back({step, change});
    }
  }
  return named;
}

// Deviations from step to step, the same in every run.
class Noise {
 public:
  double operator()(double deviation) { return deviation * normal_(random_); }
  bool happens(double probability) { return std::bernoulli_distribution(probability)(random_); }

 private:
  std::mt19937 random_{7};
  std::normal_distribution<double> normal_;
};

TEST(Stragglers, ExcessIsAboveTheMedianOfTheOthers) {
  EXPECT_EQ(excesses({{2, 1, 1}, {1, 1, 1}}), (std::vector<double>{1, -0.5}));
  EXPECT_EQ(excesses({{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {5, 1, 1}}), (std::vector<double>{-0.75, -0.5, 1, 1.5}));
  EXPECT_EQ(excesses({{1, 1, 1}, {0, 1, 1}}), (std::vector<double>{0, 0})) << "nothing is known of a rank";
  EXPECT_EQ(excesses({{1, 1, 1}}), (std::vector<double>{0}));
}

// Two thirds of a step are attention. Rank 3 has seven times the pairs of rank 0, and takes as much longer.
TEST(Stragglers, WhatThePlanGivesARankIsNoExcess) {
  for (const double attention : {0.2, 1.0, 5.0}) {  // seconds of a FLOP, in those of the rest
    std::vector<RankStep> ranks;
    for (const double pairs : {1.0, 3.0, 5.0, 7.0}) ranks.push_back({4 + attention * pairs, 4, pairs});
    for (const double excess : excesses(ranks)) EXPECT_LT(excess, 0.02) << attention;
    ranks[0].seconds *= 3;
    EXPECT_GT(excesses(ranks)[0], attention > 1 ? 0.02 : 0.2) << attention;
  }
  // Twice the tokens may take twice the time.
  for (const double excess : excesses({{1, 1, 1}, {2, 2, 2}, {1, 1, 1}})) EXPECT_NEAR(excess, 0, 1e-12);
}

TEST(Stragglers, NamesASlowRankOnceAndItsEnd) {
  Noise noise;
  Stragglers stragglers({.share = 0.2, .steps = 10});
  const std::vector<Named> named = run(stragglers, 8, 1000, [&](int64_t step, size_t rank) {
    const bool slow = rank == 5 && step >= 410 && step < 600;
    return (1 + noise(0.04)) * (slow ? 1.33 : 1);
  });
  ASSERT_EQ(named.size(), 2U);
  EXPECT_EQ(named[0].change.rank, 5);
  EXPECT_TRUE(named[0].change.slow);
  EXPECT_EQ(named[0].change.since, 410);
  EXPECT_NEAR(named[0].change.excess, 0.33, 0.06);
  EXPECT_GE(named[0].step, 410 + 8);
  EXPECT_LT(named[0].step, 410 + 10) << "within the stated number of steps";
  EXPECT_FALSE(named[1].change.slow);
  EXPECT_EQ(named[1].change.rank, 5);
  EXPECT_GE(named[1].step, 600 + 4);
  EXPECT_LE(named[1].step, 600 + 10);
}

TEST(Stragglers, NamesARankThatIsSlowFromTheFirstStepAndOneOfTwo) {
  Stragglers stragglers({.share = 0.2, .steps = 5});
  const std::vector<Named> named = run(stragglers, 2, 20, [](int64_t, size_t rank) { return rank == 1 ? 1.25 : 1; });
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].change.rank, 1);
  EXPECT_EQ(named[0].step, 5);
  EXPECT_EQ(named[0].change.since, 1);
  // Both ranks of a slow host, of two hosts with two ranks each.
  Stragglers host({.share = 0.2, .steps = 5});
  EXPECT_EQ(run(host, 4, 20, [](int64_t, size_t rank) { return rank >= 2 ? 1.5 : 1; }).size(), 2U);
}

TEST(Stragglers, ShareAndStepsAreThoseThatAreStated) {
  const auto count = [](double share, int64_t steps, const Seconds& seconds) {
    Stragglers stragglers({share, steps});
    return run(stragglers, 4, 100, seconds).size();
  };
  const Seconds fifth = [](int64_t, size_t rank) { return rank == 0 ? 1.2001 : 1; };
  EXPECT_EQ(count(0.2, 10, fifth), 1U);
  EXPECT_EQ(count(0.21, 10, fifth), 0U);
  EXPECT_EQ(count(0, 10, fifth), 0U) << "0 turns it off";
  const Seconds eight = [](int64_t step, size_t rank) { return rank == 0 && step > 50 && step <= 58 ? 2 : 1; };
  EXPECT_EQ(count(0.2, 8, eight), 2U) << "slow, and no longer";
  EXPECT_EQ(count(0.2, 10, eight), 0U);
  EXPECT_EQ(count(0.2, 1, eight), 2U);
}

// Whatever all ranks do together is no one's fault, and neither are single pauses, noise of a third of a step, and
// ranks that take turns.
TEST(Stragglers, QuietRunsNameNoOne) {
  struct Quiet {
    const char* what;
    std::function<double(Noise&, int64_t, size_t)> seconds;
  };
  const std::vector<Quiet> runs = {
      {"noise", [](Noise& noise, int64_t, size_t) { return std::max(0.05, 1 + noise(0.1)); }},
      {"much noise", [](Noise& noise, int64_t, size_t) { return std::max(0.05, 1 + noise(0.35)); }},
      {"pauses", [](Noise& noise, int64_t, size_t) { return 1 + noise(0.02) + (noise.happens(0.05) ? 4 : 0); }},
      {"a pause of several steps",
       [](Noise& noise, int64_t step, size_t rank) { return 1 + noise(0.02) + (step % 100 < 7 && rank == 1 ? 3 : 0); }},
      {"regular pauses of one rank",
       [](Noise& noise, int64_t step, size_t rank) { return 1 + noise(0.02) + (step % 3 == 0 && rank == 2 ? 3 : 0); }},
      {"uneven steps", [](Noise& noise, int64_t step, size_t) { return 1.0 + step % 7 + noise(0.05); }},
      {"turns", [](Noise& noise, int64_t step,
                   size_t rank) { return (1 + noise(0.02)) * (static_cast<size_t>(step / 3) % 4 == rank ? 1.5 : 1); }},
      {"a rank a little slower",
       [](Noise& noise, int64_t, size_t rank) { return (1 + noise(0.05)) * (rank == 3 ? 1.12 : 1); }}};
  for (const Quiet& quiet : runs) {
    for (const size_t ranks : {2, 3, 4, 16}) {
      Noise noise;
      Stragglers stragglers({.share = 0.2, .steps = 10});
      const auto named =
          run(stragglers, ranks, 3000, [&](int64_t step, size_t rank) { return quiet.seconds(noise, step, rank); });
      EXPECT_TRUE(named.empty()) << quiet.what << ", " << ranks << " ranks: rank " << named[0].change.rank
                                 << " at step " << named[0].step;
    }
  }
}

// Seconds by rank that `annulus launch -n 3 train` wrote (rank_compute_seconds), step by step, on two cores that much
// else used meanwhile: ranks vary by a factor of ten.
TEST(Stragglers, RecordedQuietRunNamesNoOne) {
  std::ifstream file("tests/runtime/run/testdata/quiet_steps.txt");
  for (const int64_t steps : {10, 20}) {
    file.clear();
    file.seekg(0);
    Stragglers stragglers({.share = 0.2, .steps = steps});
    int64_t step = 0;
    for (double a = 0, b = 0, c = 0; file >> a >> b >> c;) {
      const auto named = stragglers.add(++step, {{a, 1, 1}, {b, 1, 1}, {c, 1, 1}});
      EXPECT_TRUE(named.empty()) << "rank " << named[0].rank << " at step " << step;
    }
    EXPECT_EQ(step, 250);
  }
}

TEST(Stragglers, ForgetsStepsBeforeABreak) {
  Stragglers stragglers({.share = 0.2, .steps = 4});
  const Seconds slow = [](int64_t, size_t rank) { return rank == 0 ? 2 : 1; };
  EXPECT_TRUE(run(stragglers, 3, 3, slow).empty());
  stragglers.forget();
  EXPECT_TRUE(run(stragglers, 3, 3, slow).empty());
  EXPECT_EQ(run(stragglers, 3, 1, slow).size(), 1U);
}

TEST(Stragglers, SlowLinkIsSlowAmongThoseOfItsKind) {
  EXPECT_EQ(slow_link({0.001, 0.001, 0.1}, {0, 1, 2}), 2U);
  EXPECT_EQ(slow_link({0.001, 0.2, 0.1}, {0, 1, 2}), std::nullopt) << "two of three are not compared with one";
  EXPECT_EQ(slow_link({0.001, 0.2, 0.1, 0.001, 0.002}, {0, 1, 2, 3, 4}), 1U);
  EXPECT_EQ(slow_link({0.0001, 0.001, 0.0001}, {0, 1, 2}), std::nullopt) << "a millisecond is no matter";
  EXPECT_EQ(slow_link({0.02, 0.03, 0.019}, {0, 1, 2}), std::nullopt);
  // Links between two hosts of two ranks are slower than those inside them.
  EXPECT_EQ(slow_link({0.0001, 0.02, 0.0001, 0.021}, {0, 0, 1, 1}), std::nullopt);
  EXPECT_EQ(slow_link({0.0001, 0.02, 0.0001, 0.1}, {0, 0, 1, 1}), 3U);
  EXPECT_EQ(slow_link({0.001, 0.1}, {0, 1}), 1U);
}

}  // namespace
}  // namespace annulus::stragglers_test
