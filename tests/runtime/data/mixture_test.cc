// Tests of runtime/data/mixture.h: which source each row is drawn from.
#include "runtime/data/mixture.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <numeric>

#include "common/error.h"

namespace annulus::mixture_test {
namespace {

RC_GTEST_PROP(Mixture, DrawsByWeightWithRandomAccess, ()) {
  std::vector<double> weights;
  for (const int w : *rc::gen::container<std::vector<int>>(*rc::gen::inRange<size_t>(1, 7), rc::gen::inRange(1, 50))) {
    weights.push_back(w / *rc::gen::element(1.0, 3.0, 1000.0));
  }
  const Mixture mixture(weights);
  std::vector<int64_t> counts(weights.size(), 0);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (int64_t n = 0; n < 400; ++n) {
    RC_ASSERT(mixture.counts(n) == counts);
    const Mixture::Draw draw = mixture.at(n);
    RC_ASSERT(draw.number == counts[draw.source]);
    ++counts[draw.source];
    for (size_t i = 0; i < counts.size(); ++i) {
      const double due = weights[i] / total * static_cast<double>(n + 1);
      RC_ASSERT(std::abs(static_cast<double>(counts[i]) - due) < static_cast<double>(counts.size()));
    }
  }
}

TEST(Mixture, CountsAreExactForLargeDraws) {
  const Mixture mixture({0.7, 0.3});
  const int64_t n = 1'000'000'000'000;
  const std::vector<int64_t> counts = mixture.counts(n);
  EXPECT_EQ(counts[0] + counts[1], n);
  EXPECT_NEAR(static_cast<double>(counts[0]), 0.7e12, 1);
  EXPECT_EQ(mixture.at(n).number, counts[mixture.at(n).source]);
}

TEST(Mixture, SingleSourceGetsAllDraws) {
  const Mixture mixture({0.25});
  EXPECT_EQ(mixture.at(41).source, 0U);
  EXPECT_EQ(mixture.at(41).number, 41);
}

TEST(Mixture, EqualWeightsAlternate) {
  const Mixture mixture({2, 2, 2});
  for (int64_t n = 0; n < 30; ++n) EXPECT_EQ(mixture.at(n).source, static_cast<size_t>(n % 3)) << n;
}

TEST(Mixture, RefusesInvalidWeights) {
  for (const std::vector<double>& weights : {std::vector<double>{}, {1, 0}, {-1}, {std::nan("")}}) {
    EXPECT_THROW(Mixture{weights}, Error);
  }
}

}  // namespace
}  // namespace annulus::mixture_test
