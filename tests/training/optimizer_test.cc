// AdamW against its formula in fp64, clipping, decay of matrices alone, and the learning rate's schedule.
#include "training/optimizer.h"

#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace annulus {
namespace {

Parameters make_parameters() {
  Parameters p;
  p.add("matrix", {4, 5}, 1.0);
  p.add("vector", {6});
  p.allocate(1, at::kFloat, at::kCPU);
  return p;
}

TEST(Schedule, WarmsUpThenFallsToItsMinimum) {
  const OptimizerSettings s{.lr = 1.0, .min_lr_ratio = 0.1, .warmup = 10, .steps = 110};
  EXPECT_DOUBLE_EQ(learning_rate(s, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 9), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100000), 0.1);
  for (int64_t i = 10; i < 110; ++i) EXPECT_GE(learning_rate(s, i), learning_rate(s, i + 1));
}

TEST(Schedule, WithoutWarmupOrShorterThanIt) {
  EXPECT_DOUBLE_EQ(learning_rate({.lr = 2, .warmup = 0, .steps = 5}, 0), 2);
  EXPECT_DOUBLE_EQ(learning_rate({.lr = 2, .min_lr_ratio = 0.5, .warmup = 4, .steps = 2}, 1), 1);
  EXPECT_TRUE(std::isfinite(learning_rate({.lr = 2, .warmup = 2, .steps = 2}, 2)));
}

// Updates at these steps; at those between, none is made, as when the gradients are not finite.
void expect_formula(double clip, const std::vector<int64_t>& steps, double scale = 1) {
  Parameters p = make_parameters();
  const OptimizerSettings s{.lr = 0.01, .warmup = 0, .steps = 10, .weight_decay = 0.3, .clip = clip};
  AdamW adam(p, s);
  at::Tensor value = p.values().to(at::kDouble);
  at::Tensor m = at::zeros_like(value);
  at::Tensor v = at::zeros_like(value);
  double updates = 0;
  for (const int64_t step : steps) {
    p.gradients().copy_(at::randn({p.count()}));
    at::Tensor g = p.gradients().to(at::kDouble);
    double norm = adam.gradient_norm().item<double>();
    EXPECT_NEAR(norm, g.norm().item<double>(), 2e-6);  // 5.5e-7, the last place of an fp32 near 5, is seen
    norm *= scale;
    g = g.mul(scale);
    if (clip > 0) g = g.mul(std::min(1.0, clip / norm));
    adam.update(scale, norm, step);
    const double lr = learning_rate(s, step);
    value.narrow(0, 0, p.decayed()).mul_(1 - lr * s.weight_decay);
    m.mul_(s.beta1).add_(g, 1 - s.beta1);
    v.mul_(s.beta2).add_(g.square(), 1 - s.beta2);
    ++updates;
    const at::Tensor mean = m.div(1 - std::pow(s.beta1, updates)), square = v.div(1 - std::pow(s.beta2, updates));
    value.sub_(mean.div(square.sqrt().add(s.eps)).mul(lr));
    // Eight seeds: 2.5e-7 at most, two last places of the largest weights.
    EXPECT_LE(p.values().to(at::kDouble).sub(value).abs().max().item<double>(), 8e-7) << "step " << step;
  }
  EXPECT_EQ(adam.updates(), static_cast<int64_t>(steps.size()));
}

TEST(AdamW, EqualsItsFormula) {
  for (const double clip : {0.0, 0.5}) expect_formula(clip, {0, 1, 2, 3});
}

// Gradients that are sums over another number of targets than they were divided by.
TEST(AdamW, ScalesItsGradients) {
  for (const double scale : {0.25, 1.5}) {
    for (const double clip : {0.0, 0.5, 100.0}) expect_formula(clip, {0, 1, 2}, scale);
  }
}

TEST(LearningRate, SaysWhatAResumeMakesOfIt) {
  OptimizerSettings before{.lr = 1e-2, .warmup = 2, .steps = 6}, now = before;
  EXPECT_EQ(learning_rate_change(before, now, 6), "");
  now.steps = 12;
  EXPECT_EQ(learning_rate_change(before, now, 6),
            "the learning rate goes from 0.001 to 0.0069: it decays until run.steps, which was 6");
  EXPECT_EQ(learning_rate_change(before, now, 1), "") << "while it rises, all is as before";
  now = before;
  now.lr = 2e-2;
  EXPECT_EQ(learning_rate_change(before, now, 6), "the learning rate goes from 0.001 to 0.002");
}

TEST(AdamW, CorrectsItsBiasByTheNumberOfUpdates) { expect_formula(0.5, {1, 2, 5, 9}); }

}  // namespace
}  // namespace annulus
