// Tests of runtime/evaluation/loss_curves.h against sums that are written out here.
#include "runtime/evaluation/loss_curves.h"

#include <gtest/gtest.h>

#include <cmath>

namespace annulus::loss_curves_test {
namespace {

TEST(LossCurves, BucketsCoverEveryPositionOnce) {
  for (const int64_t length : {1, 2, 3, 5, 16, 100}) {
    LossCurves curves(length);
    std::vector<double> nats;
    std::vector<int64_t> targets;
    for (int64_t i = 0; i < length; ++i) {
      nats.push_back(static_cast<double>(i) + 0.5);
      targets.push_back(i % 3 == 1 ? -1 : i);
    }
    curves.add(0, 0, length, nats.data(), targets.data());
    curves.end_row();
    const SourceLosses losses = curves.finish();
    EXPECT_EQ(losses.rows, 1);
    for (const auto* buckets : {&losses.doubling, &losses.even, &losses.document_doubling, &losses.document_even}) {
      int64_t before = 0;
      for (const LossBucket& bucket : *buckets) {
        EXPECT_EQ(bucket.begin, before);
        EXPECT_GT(bucket.end, bucket.begin);
        before = bucket.end;
        double sum = 0;
        int64_t count = 0;
        for (int64_t i = bucket.begin; i < bucket.end; ++i) {
          if (i % 3 == 1) continue;
          sum += static_cast<double>(i) + 0.5;
          ++count;
        }
        EXPECT_EQ(bucket.targets, count);
        EXPECT_DOUBLE_EQ(bucket.nats, sum);
      }
      EXPECT_EQ(before, length);
    }
    EXPECT_FALSE(losses.all.error.has_value()) << "one document has no interval";
  }
}

// Positions within a document begin again with each of its parts, and a document that is cut counts once.
TEST(LossCurves, DocumentsAreTheUnitsOfTheInterval) {
  LossCurves curves(4);
  const double nats[] = {1, 2, 3, 4};
  const int64_t targets[] = {0, 0, 0, 0};
  curves.add(7, 0, 3, nats, targets);      // 1 + 2 + 3
  curves.add(8, 3, 1, nats + 3, targets);  // 4
  curves.end_row();
  curves.add(8, 0, 2, nats, targets);  // 1 + 2: the rest of document 8
  curves.end_row();
  const SourceLosses losses = curves.finish();
  EXPECT_EQ(losses.documents, 2);
  EXPECT_EQ(losses.all.targets, 6);
  EXPECT_DOUBLE_EQ(losses.all.nats, 13);
  EXPECT_DOUBLE_EQ(losses.document_doubling.at(0).nats, 1 + 4 + 1);
  EXPECT_DOUBLE_EQ(losses.doubling.at(0).nats, 1 + 1);
  const double mean = 13.0 / 6, squares = std::pow(6 - 3 * mean, 2) + std::pow(7 - 3 * mean, 2);
  EXPECT_NEAR(*losses.all.error, 1.96 * std::sqrt(2 * squares) / 6, 1e-12);
  // The first position of a row: 1 nat of document 7, and 1 of document 8.
  EXPECT_NEAR(losses.doubling.at(0).error.value(), 0, 1e-12);
  // Positions 2 and 3 of a row: 3 nats of document 7, 4 of document 8.
  EXPECT_NEAR(losses.doubling.at(2).error.value(), 1.96 * std::sqrt(2 * 2 * 0.25) / 2, 1e-12);
}

// Of weighted targets, losses count times their weights, and means are over the weights.
TEST(LossCurves, WeighsTargets) {
  LossCurves curves(4);
  const double nats[] = {1, 2, 3, 4};
  const int64_t targets[] = {0, 0, -1, 0};
  const float weights[] = {2, 0.5F, 0, 1};
  curves.add(7, 0, 2, nats, targets, weights);              // 2 * 1 + 0.5 * 2
  curves.add(8, 2, 2, nats + 2, targets + 2, weights + 2);  // 1 * 4
  curves.end_row();
  const SourceLosses losses = curves.finish();
  EXPECT_EQ(losses.all.targets, 3);
  EXPECT_DOUBLE_EQ(losses.all.weight.value(), 3.5);
  EXPECT_DOUBLE_EQ(losses.all.nats, 7);
  EXPECT_DOUBLE_EQ(losses.all.mean(), 2);
  EXPECT_DOUBLE_EQ(losses.doubling.at(0).mean(), 1);
  EXPECT_DOUBLE_EQ(losses.doubling.at(2).weight.value(), 1);
  // Document 7 has 3 nats of weight 2.5, document 8 has 4 of weight 1.
  const double squares = std::pow(3 - 2.5 * 2, 2) + std::pow(4 - 2, 2);
  EXPECT_NEAR(*losses.all.error, 1.96 * std::sqrt(2 * squares) / 3.5, 1e-12);
}

// About 95 % of intervals hold the mean of what documents are drawn from.
TEST(LossCurves, IntervalsHoldTheMean) {
  uint64_t state = 1;
  const auto uniform = [&state] {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<double>(state >> 11) * 0x1p-53;
  };
  int held = 0;
  constexpr int kTrials = 400;
  for (int trial = 0; trial < kTrials; ++trial) {
    LossCurves curves(64);
    for (int64_t document = 0; document < 100; ++document) {
      const auto count = static_cast<int64_t>(1 + uniform() * 60);
      const double shift = uniform();  // documents differ, so their tokens are not independent
      std::vector<double> nats(64);
      const std::vector<int64_t> targets(64, 0);
      for (double& loss : nats) loss = shift + uniform();
      curves.add(document, 0, count, nats.data(), targets.data());
      curves.end_row();
    }
    const SourceLosses losses = curves.finish();
    held += std::abs(losses.all.mean() - 1) <= *losses.all.error ? 1 : 0;
  }
  // Of 400 draws of probability 0.95 fewer than 358 come with a probability of 1e-5, and the seed is fixed.
  EXPECT_GE(held, 358);
  EXPECT_LT(held, kTrials);
}

}  // namespace
}  // namespace annulus::loss_curves_test
