// Tests of what tests compare with (exactness.h): which results pass and which do not.
#include "tests/common/exactness.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace annulus::exactness_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Exactness, UnitRoundoffIsThatOfNumericLimits) {
  EXPECT_EQ(testing::unit_roundoff(at::kDouble), std::numeric_limits<double>::epsilon() / 2);
  EXPECT_EQ(testing::unit_roundoff(at::kFloat), std::numeric_limits<float>::epsilon() / 2);
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const double u = testing::unit_roundoff(type);
    const at::Tensor near_one = at::tensor({1 + u, 1 + 1.01 * u}, at::kDouble).to(type).to(at::kDouble);
    EXPECT_EQ(near_one[0].item<double>(), 1) << type;
    EXPECT_EQ(near_one[1].item<double>(), 1 + 2 * u) << type;
  }
}

TEST(Exactness, ErrorsAreInfiniteWhereNumbersAreNotFinite) {
  const at::Tensor exact = at::tensor({1.0, -kInfinity, 3.0, NAN}, at::kDouble);
  EXPECT_EQ(testing::error_of(exact, exact), 0);
  EXPECT_EQ(testing::error_of(exact + 0.5, exact), 0.5);
  const auto with = [&](int64_t i, double value) {
    const at::Tensor got = exact.clone();
    got[i] = value;
    return testing::error_of(got, exact);
  };
  EXPECT_EQ(with(0, 3), 2);
  for (const double wrong : {kInfinity, static_cast<double>(NAN)}) EXPECT_EQ(with(0, wrong), kInfinity) << wrong;
  for (const double wrong : {kInfinity, static_cast<double>(NAN), 2.0}) EXPECT_EQ(with(1, wrong), kInfinity) << wrong;
  for (const double wrong : {kInfinity, -kInfinity, 2.0}) EXPECT_EQ(with(3, wrong), kInfinity) << wrong;
  EXPECT_EQ(testing::error_of(exact.slice(0, 1), exact), kInfinity);
  EXPECT_EQ(testing::error_of(at::Tensor(), exact), kInfinity);
  EXPECT_EQ(testing::error_of(at::zeros({0}), at::zeros({0})), 0);
}

TEST(Exactness, AgreesUpToTheRoundingOfItsTerms) {
  const at::Tensor want = at::randn({100}, at::kDouble) * 3;
  const double size = testing::largest(want);
  EXPECT_TRUE(testing::agrees(want + 0.9e-12 * size, want));
  EXPECT_FALSE(testing::agrees(want + 1.1e-12 * size, want));
  EXPECT_TRUE(testing::agrees(want + 1.1e-12 * size, want, 2 * size));
  EXPECT_FALSE(testing::agrees(want * NAN, want));
}

TEST(Exactness, AllowsAMultipleOfThePlainError) {
  const at::Tensor exact = at::randn({1000}, at::kDouble), usual = exact.to(at::kFloat);
  EXPECT_TRUE(testing::as_exact_as(usual, usual, exact));
  const at::Tensor narrow = exact.to(at::kBFloat16);
  EXPECT_TRUE(testing::as_exact_as(narrow, narrow, exact));
  EXPECT_TRUE(testing::as_exact_as(narrow, usual, exact)) << "its own rounding is allowed";
  EXPECT_FALSE(testing::as_exact_as(narrow.to(at::kFloat), usual, exact));
  EXPECT_TRUE(testing::as_exact_as(narrow.to(at::kFloat), narrow, exact));
  const at::Tensor off = usual.clone();
  off[7] += 1e-5;
  EXPECT_FALSE(testing::as_exact_as(off, usual, exact)) << "of a single element";
  EXPECT_TRUE(testing::as_exact_as(off, usual, exact, 100));
}

}  // namespace
}  // namespace annulus::exactness_test
