// Tests of attention/modules/rotary.h: the frequencies of each scaling in fp64 and fp32, and cached tables.
// integration_tests/models/rotary_tables_test.py compares them with transformers.
#include "attention/modules/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/common/exactness.h"

namespace annulus::rotary_test {
namespace {

using Kind = RotaryScaling::Kind;

RotarySpec spec(RotaryScaling scaling = {}, bool fp32 = false) {
  return {.head_dim = 64, .theta = 10000, .scaling = scaling, .fp32 = fp32};
}

const RotaryScaling kLinear{.kind = Kind::kLinear, .factor = 4};
const RotaryScaling kLlama3{.kind = Kind::kLlama3, .factor = 8, .original_context = 512};
const RotaryScaling kYarn{.kind = Kind::kYarn, .factor = 4, .original_context = 512};

TEST(Rotary, ScalingDividesLowFrequencies) {
  const at::Tensor plain = rotary_frequencies(spec());
  EXPECT_EQ(plain.scalar_type(), at::kDouble);
  EXPECT_DOUBLE_EQ(plain[0].item<double>(), 1);
  EXPECT_DOUBLE_EQ(plain[16].item<double>(), 0.01);
  EXPECT_TRUE(rotary_frequencies(spec(kLinear)).equal(plain / 4));
  for (const RotaryScaling& scaling : {kLlama3, kYarn}) {
    const at::Tensor ratio = plain / rotary_frequencies(spec(scaling));
    EXPECT_NEAR(ratio[0].item<double>(), 1, testing::kExact);
    EXPECT_NEAR(ratio[31].item<double>(), scaling.factor, testing::kExact * scaling.factor);
    EXPECT_TRUE((ratio.slice(0, 1) >= ratio.slice(0, 0, -1) - testing::kExact).all().item<bool>()) << "the ratio rises";
  }
}

TEST(Rotary, Fp32IsNearFp64) {
  for (const RotaryScaling& scaling : {RotaryScaling(), kLinear, kLlama3, kYarn}) {
    const at::Tensor wide = rotary_frequencies(spec(scaling)), narrow = rotary_frequencies(spec(scaling, true));
    EXPECT_EQ(narrow.scalar_type(), at::kFloat);
    // The rounding of an exponent changes theta^x by its share x ln(theta), a power is within two units in the last
    // place, and a scaling has fewer than ten operations.
    const double roundings = std::log(spec().theta) + 4 + 10;
    EXPECT_LT(((narrow.to(at::kDouble) - wide) / wide).abs().max().item<double>(),
              roundings * testing::unit_roundoff(at::kFloat));
  }
}

TEST(Rotary, YarnScalesCosineAndSine) {
  EXPECT_DOUBLE_EQ(spec(kYarn).attention_factor(), 0.1 * std::log(4.0) + 1);
  EXPECT_EQ(spec(kLlama3).attention_factor(), 1);
  RotaryScaling given = kYarn;
  given.attention_factor = 0.5;
  EXPECT_EQ(spec(given).attention_factor(), 0.5);
  const RotaryTable table = make_rotary_table(at::arange(3, at::kLong), spec(given), at::kDouble, at::kCPU);
  const at::Tensor square = table.cosine.square() + table.sine.square();
  EXPECT_TRUE(testing::agrees(square, at::full_like(square, 0.25)));
}

// Angles of 0, by which a rotation changes no bit.
TEST(Rotary, NoneRotatesNothing) {
  for (const bool fp32 : {false, true}) {
    const RotarySpec none = spec({.kind = Kind::kNone}, fp32);
    const RotaryTable table = make_rotary_table(at::arange(50, at::kLong), none, at::kFloat, at::kCPU);
    const at::Tensor x = at::randn({50, 2, 64});
    EXPECT_TRUE(rotate(x, table).equal(x));
    EXPECT_FALSE(
        rotate(x, make_rotary_table(at::arange(50, at::kLong), spec({}, fp32), at::kFloat, at::kCPU)).equal(x));
  }
  EXPECT_EQ(RotaryScaling{.kind = Kind::kNone}.text(), "{ kind = \"none\" }");
}

TEST(Rotary, CacheDistinguishesSpecs) {
  const std::vector<Span> spans = {{.begin = 3, .stride = 2, .count = 40}};
  const auto table = [&](const RotarySpec& s) { return rotary_table_at(spans, 0, s, at::kFloat, at::kCPU).cosine; };
  const at::Tensor plain = table(spec());
  EXPECT_TRUE(table(spec()).is_same(plain));
  RotaryScaling another = kYarn;
  another.beta_fast = 20;
  const std::vector<RotarySpec> others = {spec(kLinear), spec(kLlama3), spec(kYarn), spec(another), spec({}, true)};
  for (size_t i = 0; i < others.size(); ++i) {
    EXPECT_FALSE(table(others[i]).equal(plain)) << i;
    for (size_t j = 0; j < i; ++j) EXPECT_FALSE(table(others[i]).equal(table(others[j]))) << i << " " << j;
  }
}

}  // namespace
}  // namespace annulus::rotary_test
