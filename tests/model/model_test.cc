// The decoder: initial weights, gradients through the fused path against fp64, shapes that do not fit.
#include "model/model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/randint.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/memory/peak_bytes.h"
#include "tests/model/dense_attention.h"

namespace annulus {
namespace {

ModelShape tiny(bool tied = false) {
  return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64, .tie_embeddings = tied};
}

double loss_and_gradient(Model& model, const at::Tensor& tokens, const at::Tensor& targets) {
  model.parameters().reduced().zero_();
  const RotaryTable table = model.rotary(at::arange(tokens.size(1), at::kLong));
  const at::Tensor loss =
      model.loss(tokens, targets.flatten(), table, dense_causal(), 1.0 / static_cast<double>(targets.numel()));
  loss.backward();
  return loss.item<double>();
}

TEST(Model, BeginsAtTheLossOfAUniformGuess) {
  Model model(tiny(), 1);
  const at::Tensor tokens = at::randint(0, 64, {2, 17}, at::kLong);
  EXPECT_NEAR(loss_and_gradient(model, tokens.slice(1, 0, 16), tokens.slice(1, 1)), std::log(64.0), 0.05);
}

TEST(Model, FusedGradientsEqualThoseOfFp64) {
  for (const bool tied : {false, true}) {
    Model exact(tiny(tied), 1, at::kDouble);
    Model fused(tiny(tied), 1);
    // Larger weights than the initial ones, so that attention and gates are far from linear.
    exact.parameters().values().narrow(0, 0, exact.parameters().decayed()).mul_(4);
    fused.parameters().values().copy_(exact.parameters().values());
    const at::Tensor tokens = at::randint(0, 64, {3, 14}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 13);
    const at::Tensor y = tokens.slice(1, 1);
    const double want = loss_and_gradient(exact, x, y);
    // Of eight seeds the loss was off by 5e-8 at most, the gradient by 4e-7.
    EXPECT_NEAR(loss_and_gradient(fused, x, y), want, 2e-7 * want);
    const at::Tensor g = exact.parameters().gradients();
    const double error = fused.parameters().gradients().to(at::kDouble).sub(g).norm().item<double>();
    EXPECT_LE(error, 1.2e-6 * g.norm().item<double>());
    for (const NamedTensor& t : exact.parameters().views(g)) EXPECT_GT(t.tensor.norm().item<double>(), 0) << t.name;
  }
}

TEST(Model, GradientsOfFp64EqualFiniteDifferences) {
  Model model(tiny(), 3, at::kDouble);
  model.parameters().values().narrow(0, 0, model.parameters().decayed()).mul_(4);
  const at::Tensor tokens = at::randint(0, 64, {2, 10}, at::kLong);
  const at::Tensor x = tokens.slice(1, 0, 9);
  const at::Tensor y = tokens.slice(1, 1);
  loss_and_gradient(model, x, y);
  const at::Tensor g = model.parameters().gradients().clone();
  const at::Tensor direction = named_normal(5, "direction", model.parameters().count()).to(at::kDouble);
  const double h = 1e-6;
  model.parameters().values().add_(direction, h);
  const double up = loss_and_gradient(model, x, y);
  model.parameters().values().add_(direction, -2 * h);
  const double down = loss_and_gradient(model, x, y);
  const double slope = g.mul(direction).sum().item<double>();
  EXPECT_NEAR((up - down) / (2 * h), slope, 1e-7 * std::abs(slope));  // 3e-8 of eight slopes
}

TEST(Model, RecomputesAllButAttentionAndKeepsLess) {
  ModelShape shape = tiny();
  shape.layers = 6, shape.ffn = 96;
  const at::Tensor tokens = at::randint(0, 64, {3, 65}, at::kLong);
  const at::Tensor x = tokens.slice(1, 0, 64), y = tokens.slice(1, 1);
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    Model model(shape, 1, type);
    model.parameters().values().narrow(0, 0, model.parameters().decayed()).mul_(4);
    const RotaryTable table = model.rotary(at::arange(64, at::kLong));
    int64_t attended = 0;
    const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
      ++attended;
      return dense_causal()(q, k, v, layer);
    };
    std::vector<at::Tensor> losses, gradients;
    std::vector<int64_t> peaks;
    for (const bool recompute : {false, true}) {
      model.set_recompute(recompute);
      model.parameters().reduced().zero_();
      attended = 0;
      const auto peak = std::make_shared<PeakBytes>();
      {
        const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
        const at::Tensor loss = model.loss(x, y.flatten(), table, attend, 1.0 / 192);
        loss.backward();
        losses.push_back(loss.detach());
      }
      EXPECT_EQ(attended, shape.layers);
      gradients.push_back(model.parameters().gradients().clone());
      peaks.push_back(peak->peak());
    }
    EXPECT_TRUE(losses[0].equal(losses[1]));
    EXPECT_TRUE(gradients[0].equal(gradients[1]));
    EXPECT_GT(gradients[0].norm().item<double>(), 0);
    EXPECT_LT(peaks[1], peaks[0] * 2 / 3) << toString(type);
    RecordProperty(std::string("peak_") + toString(type), std::to_string(peaks[1]) + " of " + std::to_string(peaks[0]));
  }
}

TEST(Model, WeightsDependOnSeedAndNameAlone) {
  Model a(tiny(), 7);
  ModelShape deeper = tiny();
  deeper.layers = 3;
  Model b(deeper, 7);
  Model c(tiny(), 8);
  const auto find = [](const Model& m, const std::string& name) {
    for (const NamedTensor& t : m.parameters().views(m.parameters().values())) {
      if (t.name == name) return t.tensor;
    }
    ADD_FAILURE() << name;
    return at::Tensor();
  };
  const std::string name = "model.layers.1.self_attn.k_proj.weight";
  EXPECT_TRUE(find(a, name).equal(find(b, name)));
  EXPECT_FALSE(find(a, name).equal(find(c, name)));
  EXPECT_EQ(find(a, name).sizes(), at::IntArrayRef({16, 32}));
  EXPECT_TRUE(find(a, "model.norm.weight").eq(1).all().item<bool>());
  EXPECT_NEAR(find(a, "lm_head.weight").std().item<double>(), 0.02, 0.002);
  EXPECT_NEAR(find(a, "model.layers.0.mlp.down_proj.weight").std().item<double>(), 0.01, 0.001);
}

TEST(Model, CountsItsParametersBeforeItHasThem) {
  for (const bool tied : {false, true}) {
    EXPECT_EQ(parameter_count(tiny(tied)), Model(tiny(tied), 1).parameters().count());
  }
}

TEST(Model, ParametersCoverTheFlatVectorOnce) {
  const Model model(tiny(true), 1);
  int64_t offset = 0;
  std::set<std::string> names;
  for (const ParameterInfo& p : model.parameters().list()) {
    EXPECT_EQ(p.offset, offset);
    offset += p.shape.size() == 2 ? p.shape[0] * p.shape[1] : p.shape[0];
    EXPECT_TRUE(names.insert(p.name).second) << p.name;
    EXPECT_EQ(p.shape.size() == 2, p.offset < model.parameters().decayed());
  }
  EXPECT_EQ(offset, model.parameters().count());
  EXPECT_EQ(names.count("lm_head.weight"), 0U);
}

TEST(Model, LogitsOfTheLastPositionAlone) {
  const Model model(tiny(), 2);
  const at::Tensor tokens = at::randint(0, 64, {3, 11}, at::kLong);
  const RotaryTable table = model.rotary(at::arange(11, at::kLong));
  const at::Tensor all = model.logits(tokens, table, dense_causal()).view({3, 11, 64}).select(1, 10);
  const at::Tensor last = model.logits(tokens, table, dense_causal(), /*last_only=*/true);
  EXPECT_LE(all.sub(last).abs().max().item<double>(), 3e-7);  // 9e-8 was seen
}

TEST(Model, RefusesShapesThatDoNotFit) {
  for (const auto& change : std::vector<std::function<void(ModelShape&)>>{
           [](ModelShape& s) { s.layers = 0; }, [](ModelShape& s) { s.heads = 3; }, [](ModelShape& s) { s.dim = 36; },
           [](ModelShape& s) { s.kv_heads = 3; }, [](ModelShape& s) { s.vocab = -1; }}) {
    ModelShape shape = tiny();
    change(shape);
    try {
      validate(shape);
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kPlan);
    }
  }
}

}  // namespace
}  // namespace annulus
