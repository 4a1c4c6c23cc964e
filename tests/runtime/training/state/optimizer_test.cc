// Tests of runtime/training/state/optimizer.h: AdamW is compared with its formula in fp64, with clipping and per-range
// weight decay, and the learning-rate schedules with known values.
#include "runtime/training/state/optimizer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "memory/tiers/tiered_tensors.h"
#include "runtime/training/state/learning_rate.h"

namespace annulus::optimizer_test {
namespace {

constexpr double kDecay = 0.3;

// Two vectors; only a part of the first has weight decay.
std::vector<Updated> some_weights(at::ScalarType dtype) {
  return {{.values = at::randn({40}, dtype),
           .gradients = at::zeros({40}, dtype),
           .rated = {{0, 32, {1, kDecay}}, {32, 40, {}}}},
          {.values = at::randn({16}, dtype), .gradients = at::zeros({16}, dtype), .rated = {{0, 16, {}}}}};
}

at::Tensor joined(const std::vector<Updated>& updated, at::Tensor Updated::*of) {
  return at::cat({updated[0].*of, updated[1].*of});
}

at::Tensor joined(const std::vector<PlacedVector>& vectors) {
  std::vector<at::Tensor> parts;
  for (const PlacedVector& vector : vectors) parts.push_back(vector.read(0, vector.numel()));
  return at::cat(parts);
}

TEST(Schedule, WarmsUpThenDecaysToItsMinimum) {
  const OptimizerSettings s{.lr = 1.0, .min_lr_ratio = 0.1, .warmup = 10, .steps = 110};
  EXPECT_DOUBLE_EQ(learning_rate(s, 0), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 9), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100000), 0.1);
  for (int64_t i = 10; i < 110; ++i) EXPECT_GE(learning_rate(s, i), learning_rate(s, i + 1));
}

TEST(Schedule, HandlesNoWarmupAndRunsShorterThanIt) {
  EXPECT_DOUBLE_EQ(learning_rate({.lr = 2, .warmup = 0, .steps = 5}, 0), 2);
  EXPECT_DOUBLE_EQ(learning_rate({.lr = 2, .min_lr_ratio = 0.5, .warmup = 4, .steps = 2}, 1), 1);
  EXPECT_TRUE(std::isfinite(learning_rate({.lr = 2, .warmup = 2, .steps = 2}, 2)));
}

// integration_tests/schedules_test.py compares whole runs with PyTorch's schedulers.
TEST(Schedule, LinearConstantAndWsd) {
  OptimizerSettings s{.schedule = RateSchedule::kLinear, .lr = 1.0, .min_lr_ratio = 0.1, .warmup = 10, .steps = 110};
  EXPECT_DOUBLE_EQ(learning_rate(s, 4), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(s, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100000), 0.1);
  s.schedule = RateSchedule::kConstant;
  for (const int64_t step : {9, 10, 60, 110, 100000}) EXPECT_EQ(learning_rate(s, step), 1.0);
  s.schedule = RateSchedule::kWsd;
  s.decay = 20;
  for (const int64_t step : {9, 10, 60, 90}) EXPECT_EQ(learning_rate(s, step), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(s, 100), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(s, 110), 0.1);
  s.decay = 1000;
  EXPECT_DOUBLE_EQ(learning_rate(s, 60), 0.55) << "it falls from the warm-up's end on at the earliest";
}

TEST(Schedule, NamesRoundTrip) {
  for (const std::string_view name : {"cosine", "linear", "constant", "wsd"}) {
    EXPECT_EQ(rate_schedule_name(parse_rate_schedule(name)), name);
  }
  EXPECT_THROW(parse_rate_schedule("step"), Error);
}

// Updates at the given steps and compares with the formula. The steps in between have no update, as when gradients are
// not finite. An update rounds a weight twice, when it decays and when the step is subtracted. The step, which is at
// most of the size of the learning rate, 0.01, is rounded less than a hundred times on its way, so all that counts less
// than a third time.
void expect_formula(at::ScalarType dtype, double clip, const std::vector<int64_t>& steps, double scale = 1) {
  const double roundoff = dtype == at::kDouble ? 0x1p-53 : 0x1p-24;
  const std::vector<Updated> p = some_weights(dtype);
  const OptimizerSettings s{.lr = 0.01, .warmup = 0, .steps = 10, .clip = clip};
  AdamW adam(p, s);
  at::Tensor value = joined(p, &Updated::values).to(at::kDouble);
  at::Tensor m = at::zeros_like(value);
  at::Tensor v = at::zeros_like(value);
  double updates = 0;
  for (const int64_t step : steps) {
    for (const Updated& u : p) at::Tensor(u.gradients).copy_(at::randn({u.gradients.numel()}, dtype));
    at::Tensor g = joined(p, &Updated::gradients).to(at::kDouble);
    const double norm = scale * g.norm().item<double>();
    g = g.mul(scale);
    if (clip > 0) g = g.mul(std::min(1.0, clip / norm));
    adam.update(scale, norm, step);
    const double lr = learning_rate(s, step);
    value.narrow(0, 0, 32).mul_(1 - lr * kDecay);
    m.mul_(s.beta1).add_(g, 1 - s.beta1);
    v.mul_(s.beta2).add_(g.square(), 1 - s.beta2);
    ++updates;
    const at::Tensor mean = m.div(1 - std::pow(s.beta1, updates)), square = v.div(1 - std::pow(s.beta2, updates));
    value.sub_(mean.div(square.sqrt().add(s.eps)).mul(lr));
    const double largest = std::max(1.0, value.abs().max().item<double>());
    EXPECT_LE(joined(p, &Updated::values).to(at::kDouble).sub(value).abs().max().item<double>(),
              3 * updates * roundoff * largest)
        << "step " << step << ", " << dtype;
  }
  EXPECT_EQ(adam.updates(), static_cast<int64_t>(steps.size()));
}

TEST(AdamW, MatchesItsFormula) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double clip : {0.0, 0.5}) expect_formula(dtype, clip, {0, 1, 2, 3});
  }
}

// The scale corrects gradients that were divided by another number of targets than they are sums over.
TEST(AdamW, ScalesItsGradients) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const double scale : {0.25, 1.5}) {
      for (const double clip : {0.0, 0.5, 100.0}) expect_formula(dtype, clip, {0, 1, 2}, scale);
    }
  }
}

TEST(AdamW, DividesByTheLargestDivisor) {
  const OptimizerSettings s{.lr = 0.01, .clip = 1};
  EXPECT_EQ(gradient_divisor(s, 0.5, 0.25), 2);
  EXPECT_EQ(gradient_divisor(s, 0.5, 3), 6);
  EXPECT_EQ(gradient_divisor({.clip = 0}, 1, 1e300), 1);
  EXPECT_TRUE(std::isinf(gradient_divisor({.clip = 1e-300}, 1, 1e300)));
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const std::vector<Updated> p = some_weights(dtype);
    AdamW adam(p, s);
    adam.update(1, largest_divisor(dtype), 0);
    EXPECT_TRUE(joined(p, &Updated::values).isfinite().all().item<bool>());
  }
}

TEST(LearningRate, ReportsHowAResumeChangesIt) {
  OptimizerSettings before{.lr = 1e-2, .warmup = 2, .steps = 6}, now = before;
  EXPECT_EQ(learning_rate_change(before, now, 6), "");
  now.steps = 12;
  EXPECT_EQ(learning_rate_change(before, now, 6),
            "the learning rate goes from 0.001 to 0.0069: it decays until run.steps, which was 6");
  EXPECT_EQ(learning_rate_change(before, now, 1), "") << "the warm-up is the same";
  now = before;
  now.lr = 2e-2;
  EXPECT_EQ(learning_rate_change(before, now, 6), "the learning rate goes from 0.001 to 0.002");
  now = before;
  now.schedule = RateSchedule::kConstant;
  now.steps = 12;
  EXPECT_EQ(learning_rate_change(before, now, 6),
            "the learning rate goes from 0.001 to 0.01: optimizer.schedule was \"cosine\"");
  before.schedule = RateSchedule::kConstant;
  EXPECT_EQ(learning_rate_change(before, now, 6), "");
  before.schedule = now.schedule = RateSchedule::kWsd;
  before.decay = now.decay = 2;
  EXPECT_EQ(learning_rate_change(before, now, 6),
            "the learning rate goes from 0.001 to 0.01: it decays over the last 2 steps until run.steps, which was 6");
}

// The ranges of elements [begin, end), counted from `begin`.
std::vector<RatedRange> cut(const std::vector<RatedRange>& ranges, int64_t begin, int64_t end) {
  std::vector<RatedRange> of;
  for (const RatedRange& r : ranges) {
    const int64_t first = std::max(begin, r.begin), last = std::min(end, r.end);
    if (first < last) of.push_back({first - begin, last - begin, r.rates});
  }
  return of;
}

// Wherever ranges begin and however the vector is cut, each element has the same bits as in a vector that has that
// element's rates throughout.
TEST(AdamW, RateRangesMayBeginAtAnyElement) {
  const int64_t n = 16 * 12;
  const at::Tensor start = at::randn({n}), gradients = at::randn({n});
  const OptimizerSettings s{.lr = 0.01, .warmup = 0, .steps = 10, .clip = 0.5};
  const std::vector<RatedRange> ranges = {{0, 20, {1, kDecay}},     {20, 25, {0.1, 0}},      {25, 26, {0.5, kDecay}},
                                          {26, 31, {0.1, 0}},       {31, 64, {2, 0.1}},      {64, 80, {1, 0}},
                                          {80, 159, {0.1, kDecay}}, {159, 161, {1, kDecay}}, {161, n, {0, 0.2}}};
  struct Result {
    at::Tensor values, means, squares;
  };
  const auto updated_in = [&](const std::vector<int64_t>& cuts, const std::vector<RatedRange>& rated) {
    at::Tensor values = start.clone();
    std::vector<Updated> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
      parts.push_back({.values = values.narrow(0, begin, count),
                       .gradients = gradients.narrow(0, begin, count).clone(),
                       .rated = cut(rated, begin, begin + count)});
    }
    AdamW adam(parts, s);
    for (int64_t step = 0; step < 3; ++step) {
      for (size_t i = 0; i < parts.size(); ++i) {
        at::Tensor(parts[i].gradients).copy_(gradients.narrow(0, cuts[i], cuts[i + 1] - cuts[i]));
      }
      adam.update(0.7, 3.1, step);
    }
    return Result{values, joined(adam.exp_avg()), joined(adam.exp_avg_sq())};
  };
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, n}, {0, 16, 32, n}, {0, 32, 96, 160, n}}) {
    const Result mixed = updated_in(cuts, ranges);
    for (const RatedRange& range : ranges) {
      const Result alone = updated_in({0, n}, {{0, n, range.rates}});
      const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
        return a.slice(0, range.begin, range.end).equal(b.slice(0, range.begin, range.end));
      };
      EXPECT_TRUE(same(mixed.values, alone.values)) << range.begin;
      EXPECT_TRUE(same(mixed.means, alone.means)) << range.begin;
      EXPECT_TRUE(same(mixed.squares, alone.squares)) << range.begin;
    }
  }
  const Result frozen = updated_in({0, n}, {{0, n, {0, 0.2}}});
  EXPECT_TRUE(frozen.values.equal(start)) << "a rate of 0 leaves values as they are";
}

// Ranks that hold one part each compute the same bits as one rank that holds all.
TEST(AdamW, PartsOfMultiplesOf16ElementsMatchTheWholeBitwise) {
  const int64_t n = 16 * 41;
  const at::Tensor start = at::randn({n}), gradients = at::randn({n});
  const OptimizerSettings s{.lr = 0.01, .warmup = 0, .steps = 10, .clip = 0.5};
  const std::vector<RatedRange> whole_ranges = {{0, 16 * 30, {1, kDecay}}, {16 * 30, n, {}}};
  const auto updated_in = [&](const std::vector<int64_t>& cuts) {
    at::Tensor values = start.clone();
    std::vector<Updated> parts;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
      parts.push_back({.values = values.narrow(0, begin, count),
                       .gradients = gradients.narrow(0, begin, count).clone(),
                       .rated = cut(whole_ranges, begin, begin + count)});
    }
    AdamW adam(parts, s);
    for (int64_t step = 0; step < 3; ++step) adam.update(0.7, 3.1, step);
    return values;
  };
  const at::Tensor whole = updated_in({0, n});
  EXPECT_FALSE(whole.equal(start));
  EXPECT_TRUE(updated_in({0, 16, n}).equal(whole));
  EXPECT_TRUE(updated_in({0, 16 * 7, 16 * 30, 16 * 33, n}).equal(whole));
}

// Values, moments and leaves have the same bits, wherever they lie and whatever the chunks are. In fp32 and fp64 the
// values stay on the device; with leaves in bf16 they are in the tier.
TEST(AdamW, StateInATierHasTheSameBits) {
  const std::vector<int64_t> sizes = {16 * 12, 16, 16 * 70};
  const std::vector<RatedRange> ranges = {
      {0, 20, {1, kDecay}}, {20, 25, {0.1, 0}}, {25, 100, {0.5, kDecay}}, {100, 16 * 70, {2, 0.1}}};
  const OptimizerSettings s{.lr = 0.01, .warmup = 0, .steps = 10, .clip = 0.5};
  for (const bool leaves : {false, true}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      for (const int64_t chunk : {16, 48, 1024}) {
        TieredTensors tier({.dtype = dtype, .chunk = chunk},
                           TierFile::in_folder(::testing::TempDir(), "optimizer.offload"));
        std::vector<Updated> here, there;
        for (const int64_t size : sizes) {
          const at::Tensor values = at::randn({size}, dtype);
          here.push_back(
              {.values = values.clone(), .gradients = at::zeros_like(values), .rated = cut(ranges, 0, size)});
          there.push_back({.gradients = at::zeros_like(values), .rated = here.back().rated});
          if (leaves) {
            there.back().in_tier = tier.add(size);
            there.back().leaves = at::zeros({size}, at::kBFloat16);
            tier.write(*there.back().in_tier, 0, values);
          } else {
            there.back().values = values.clone();
          }
        }
        AdamW resident(here, s), tiered(there, s, &tier);
        for (int64_t step = 0; step < 3; ++step) {
          for (size_t i = 0; i < sizes.size(); ++i) {
            here[i].gradients.copy_(at::randn({sizes[i]}, dtype));
            there[i].gradients.copy_(here[i].gradients);
          }
          resident.update(0.7, 3.1, step);
          tiered.update(0.7, 3.1, step);
          const std::string what = "chunks of " + std::to_string(chunk) + ", step " + std::to_string(step);
          for (size_t i = 0; i < sizes.size(); ++i) {
            const at::Tensor values = leaves ? tier.read(*there[i].in_tier, 0, sizes[i]) : there[i].values;
            EXPECT_TRUE(values.equal(here[i].values)) << what;
            if (leaves) {
              EXPECT_TRUE(there[i].leaves.equal(values.to(at::kBFloat16))) << what;
            }
          }
          EXPECT_TRUE(joined(tiered.exp_avg()).equal(joined(resident.exp_avg()))) << what;
          EXPECT_TRUE(joined(tiered.exp_avg_sq()).equal(joined(resident.exp_avg_sq()))) << what;
        }
      }
    }
  }
}

TEST(AdamW, BiasCorrectionCountsUpdatesNotSteps) { expect_formula(at::kFloat, 0.5, {1, 2, 5, 9}); }

}  // namespace
}  // namespace annulus::optimizer_test
