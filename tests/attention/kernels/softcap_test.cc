// Tests of soft caps of scores, c tanh(score / c): the vectors' tanh and its derivative (tile_math.h), for every
// instruction set, and kernels against the definition.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/kernels/cpu/tile_math.h"
#include "tests/attention/kernels/kernel_case.h"
#include "tests/common/exactness.h"

namespace annulus::softcap_test {
namespace {

using testing::by_definition;
using testing::Case;
using testing::Expected;
using testing::right;
using testing::run;
using testing::unit_roundoff;

template <typename T>
class CapOf : public ::testing::Test {
 protected:
  static constexpr double kUnit = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
  static constexpr int64_t kColumns = 512;
  const TileMath<T>& math = tile_math<T>();

  // Caps numbers in rows of a tile, whose last columns are in no run.
  std::vector<T> capped(std::vector<T> x, T scale, T softcap) {
    const std::vector<annulus::Run> runs{{0, 4 * math.lanes}, {5 * math.lanes, kColumns - math.lanes}};
    math.cap(static_cast<int64_t>(x.size()) / kColumns, x.data(), kColumns, runs.data(), 2, scale, softcap);
    return x;
  }
  bool in_a_run(size_t i) const {
    const int64_t c = static_cast<int64_t>(i) % kColumns;
    return c < 4 * math.lanes || (c >= 5 * math.lanes && c < kColumns - math.lanes);
  }
};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(CapOf, Types);

// From numbers that a cap hardly changes to those that are all cap. The bound is that of tile_math.h, and two more
// roundings of scale / softcap and of the product with the cap.
TYPED_TEST(CapOf, TanhIsWithinEightRoundings) {
  using T = TypeParam;
  std::mt19937 draw(1);
  double most = 0;
  for (const double cap : {1e-3, 0.7, 50.0, 1e6}) {
    for (int exponent = -30; exponent <= 6; ++exponent) {
      std::uniform_real_distribution<double> mantissa(1, 2);
      std::vector<T> x(static_cast<size_t>(this->math.rows * this->kColumns));
      for (T& value : x) {
        value = static_cast<T>(cap * std::ldexp(mantissa(draw), exponent) * (draw() % 2 == 0 ? 1 : -1));
      }
      const T scale = static_cast<T>(0.37), softcap = static_cast<T>(cap);
      const std::vector<T> y = this->capped(x, scale, softcap);
      for (size_t i = 0; i < x.size(); ++i) {
        if (!this->in_a_run(i)) {
          ASSERT_EQ(y[i], x[i]);
          continue;
        }
        const long double c = softcap, want = c * std::tanh(static_cast<long double>(scale) * x[i] / c);
        most = std::max(most, static_cast<double>(std::abs((y[i] - want) / want)));
        ASSERT_LE(std::abs(y[i]), softcap);
      }
    }
  }
  EXPECT_TRUE(testing::within(most, (8 + 2) * this->kUnit));
}

TYPED_TEST(CapOf, InfinitiesAreTheCapAndNansStay) {
  using T = TypeParam;
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  std::vector<T> x(static_cast<size_t>(this->kColumns), T{0.25});
  x[0] = kInfinity, x[1] = -kInfinity, x[2] = std::numeric_limits<T>::quiet_NaN(), x[3] = T{0};
  for (const double cap : {1e-30, 3.0, 1e30}) {
    const auto c = static_cast<T>(cap);
    const std::vector<T> y = this->capped(x, T{1}, c);
    EXPECT_EQ(y[0], c);
    EXPECT_EQ(y[1], -c);
    EXPECT_TRUE(std::isnan(y[2]));
    EXPECT_EQ(y[3], T{0});
    EXPECT_NEAR(static_cast<double>(y[4]), cap * std::tanh(0.25 / cap), 10 * this->kUnit * 0.25);
  }
}

// The gradient of a capped score is that of the score times 1 - tanh^2, and 0 for a hidden pair.
TYPED_TEST(CapOf, GradientHasTheDerivative) {
  using T = TypeParam;
  const TileMath<T>& math = this->math;
  const size_t n = static_cast<size_t>(this->kColumns);
  const T cap = 2;
  std::mt19937 draw(2);
  std::normal_distribution<double> normal;
  for (const bool drops : {false, true}) {
    std::vector<T> x(n), dp(n), factors(n, T{1.25});
    for (size_t i = 0; i < n; ++i) x[i] = static_cast<T>(3 * normal(draw)), dp[i] = static_cast<T>(normal(draw));
    const annulus::Run run{0, this->kColumns};
    std::vector<T> p = x, ds = dp;
    math.cap(1, p.data(), this->kColumns, &run, 1, T{1}, cap);
    p[5] = -std::numeric_limits<T>::infinity();
    const T lse = 1, delta = static_cast<T>(0.3);
    math.gradient(1, p.data(), ds.data(), this->kColumns, &run, 1, T{1}, 1 / cap, drops ? factors.data() : nullptr,
                  &lse, &delta);
    const double factor = drops ? 1.25 : 1;
    for (size_t i = 0; i < n; ++i) {
      const double tanh = std::tanh(static_cast<double>(x[i]) / 2), e = i == 5 ? 0 : std::exp(2 * tanh - 1);
      const double difference = factor * static_cast<double>(dp[i]) - static_cast<double>(delta);
      // e is off by 8 + 4 roundings and those of its exponent, at most 3, and 1 - tanh^2 by 2 * 8 of at most 1.
      const double bound = 40 * this->kUnit * (1 + e * (std::abs(factor * static_cast<double>(dp[i])) + 0.3));
      EXPECT_NEAR(static_cast<double>(p[i]), e * factor, bound) << i;
      EXPECT_NEAR(static_cast<double>(ds[i]), e * difference * (1 - tanh * tanh), bound) << i;
    }
  }
}

// Caps that most scores are far below, of their size, and far below them.
TEST(SoftCap, KernelsEqualTheDefinition) {
  struct Settings {
    double cap, rate;
    int64_t dim;
  };
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto& [cap, rate, dim] : {Settings{0.3, 0, 33}, {0.3, 0.3, 8}, {2, 0, 8}, {2, 0.3, 33}, {40, 0.3, 33}}) {
      Case c = testing::scattered(type, /*one_head=*/false, dim);
      c.call.softcap = cap;
      c.call.dropout = {rate, 7, 3, 1, 5};
      const Expected want = by_definition(c);
      for (const KernelKind kind : {KernelKind::kReference, KernelKind::kCpu, KernelKind::kEfficient}) {
        EXPECT_TRUE(right(run(c, kind), c, want)) << to_string(kind) << " " << type << " " << cap << " " << rate;
      }
    }
  }
}

// Hidden keys that are not finite reach no result through a cap either: their scores would be the cap.
TEST(SoftCap, HiddenValuesDoNotLeak) {
  Case c = testing::scattered(at::kDouble, /*one_head=*/false);
  c.call.softcap = 2;
  Tile t = c.tiles.back();
  t.heads = {0, 1, 4};
  t.query_rows = t.query_positions = {0, 1, 100};
  t.key_rows = t.key_positions = {0, 1, 200};
  t.grad_rows = {11, 1, 200};
  t.band = {-Band::kUnbounded, 0};
  c.tiles = {t};
  const Expected want = by_definition(c);
  for (const double value : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    Case holes = c;
    for (at::Tensor* keys : {&holes.keys.k, &holes.keys.v}) {
      *keys = keys->clone();
      keys->narrow(1, 150, 26).fill_(value);  // no query sees them
    }
    for (const KernelKind kind : {KernelKind::kReference, KernelKind::kCpu, KernelKind::kEfficient}) {
      EXPECT_TRUE(right(run(holes, kind), holes, want)) << to_string(kind) << " " << value;
    }
  }
}

}  // namespace
}  // namespace annulus::softcap_test
