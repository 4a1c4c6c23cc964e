// Tests of the decoder: initial weights, gradients of the fused path against fp64, and invalid shapes.
#include "runtime/model/model.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "memory/peak_bytes.h"
#include "memory/tiers/offload.h"
#include "tests/common/exactness.h"
#include "tests/common/expect_error.h"
#include "tests/runtime/model/dense_attention.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus::model_test {
namespace {

ModelShape tiny(bool tied = false) {
  return {.layers = 2, .dim = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 64, .tie_embeddings = tied};
}

// A shape with every option.
ModelShape rich(bool tied = false) {
  ModelShape shape = tiny(tied);
  shape.head_size = 12;
  shape.qkv_bias = shape.out_bias = shape.mlp_bias = shape.qk_norm = true;
  shape.rope_scaling = {.kind = RotaryScaling::Kind::kYarn, .factor = 4, .original_context = 16};
  return shape;
}

// A shape with a residual stream of four norms a layer and rotary settings by layer, as Gemma 3 has them.
ModelShape four_norms(bool tied = false) {
  ModelShape shape = tiny(tied);
  shape.head_size = 12;
  shape.qk_norm = shape.post_norms = shape.norm_zero_centered = shape.scale_embeddings = true;
  shape.activation = Activation::kGeluTanh;
  shape.rope_layers.cycle = {{.own = true, .theta = 300},
                             {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}}};
  return shape;
}

// Fills vectors with random values. Biases begin as zeros, which would hide mistakes.
void fill_vectors(Parameters& parameters) {
  for (const NamedTensor& t : parameters.value_views()) {
    if (t.tensor.dim() == 1) at::Tensor(t.tensor).add_(named_normal(9, t.name, t.tensor.numel()), 0.3);
  }
}

double loss_and_gradient(Model& model, const at::Tensor& tokens, const at::Tensor& targets) {
  zero_gradients(model.parameters());
  const RotaryTables table = model.rotary(at::arange(tokens.size(1), at::kLong));
  const at::Tensor loss =
      model.loss(tokens, targets.flatten(), table, dense_causal(), 1.0 / static_cast<double>(targets.numel()));
  loss.backward();
  return loss.item<double>();
}

TEST(Model, InitialLossIsThatOfAUniformGuess) {
  Model model(tiny(), 1);
  const at::Tensor tokens = at::randint(0, 64, {2, 17}, at::kLong);
  // A logit is the sum of 32 normed elements times weights with the standard deviation 0.02, so logits vary by
  // sqrt(32) 0.02 = 0.113. The mean of 32 losses varies by a sixth of it, 0.02; its expectation is half the square
  // above the logarithm.
  EXPECT_NEAR(loss_and_gradient(model, tokens.slice(1, 0, 16), tokens.slice(1, 1)), std::log(64.0), 6 * 0.02 + 0.0064);
}

TEST(Model, FusedGradientsEqualThoseOfFp64) {
  for (const ModelShape& shape :
       {tiny(false), tiny(true), rich(false), rich(true), four_norms(false), four_norms(true)}) {
    Model exact(shape, 1, at::kDouble);
    Model fused(shape, 1);
    scale_matrices(exact.parameters(), 4);
    fill_vectors(exact.parameters());
    copy_values(exact.parameters(), fused.parameters());
    const at::Tensor tokens = at::randint(0, 64, {3, 14}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 13);
    const at::Tensor y = tokens.slice(1, 1);
    const double want = loss_and_gradient(exact, x, y);
    const at::Tensor g = flat(exact.parameters().gradient_views()), w = flat(exact.parameters().value_views());
    const double loss = loss_and_gradient(fused, x, y);
    const auto error = [&](const Model& m) {
      return flat(m.parameters().gradient_views()).to(at::kDouble).sub(g).norm().item<double>();
    };
    const double of_fused = error(fused);
    // What rounding the weights alone changes is the yardstick. A pass through a layer and back rounds elements in
    // about 24 operations, in any direction.
    copy_values(fused.parameters(), exact.parameters());
    loss_and_gradient(exact, x, y);
    const double roundings = std::sqrt(24 * static_cast<double>(shape.layers));
    EXPECT_TRUE(testing::within(of_fused, testing::kMultiple * roundings * error(exact)));
    const double unit = testing::unit_roundoff(at::kFloat);
    const double of_loss = unit * (want + g.mul(w).norm().item<double>());
    EXPECT_TRUE(testing::within(std::abs(loss - want), testing::kMultiple * roundings * of_loss));
    for (const NamedTensor& t : exact.parameters().gradient_views()) {
      EXPECT_GT(t.tensor.norm().item<double>(), 0) << t.name;
    }
  }
}

TEST(Model, GradientsOfFp64EqualFiniteDifferences) {
  for (const ModelShape& shape : {tiny(), rich(), four_norms()}) {
    Model model(shape, 3, at::kDouble);
    scale_matrices(model.parameters(), 4);
    fill_vectors(model.parameters());
    const at::Tensor tokens = at::randint(0, 64, {2, 10}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 9);
    const at::Tensor y = tokens.slice(1, 1);
    loss_and_gradient(model, x, y);
    const at::Tensor g = flat(model.parameters().gradient_views());
    const at::Tensor direction = named_normal(5, "direction", model.parameters().count()).to(at::kDouble);
    const auto difference = [&](double h) {
      const auto loss_at = [&](double step) {
        add_to_values(model.parameters(), direction, step);
        const double loss = loss_and_gradient(model, x, y);
        add_to_values(model.parameters(), direction, -step);
        return loss;
      };
      return (loss_at(h) - loss_at(-h)) / (2 * h);
    };
    // The error of a central difference is proportional to h^2, so that two of them differ by three times that of the
    // better one. The rounding of the losses, which are about 10, is divided by h.
    const double h = 1e-5, better = difference(h), worse = difference(2 * h);
    EXPECT_NEAR(better, g.mul(direction).sum().item<double>(), std::abs(better - worse) + testing::kExact * 10 / h);
  }
}

TEST(Model, RecomputesAllButAttentionAndKeepsLess) {
  for (ModelShape shape : {tiny(), rich(), four_norms()}) {
    shape.layers = 6, shape.ffn = 96;
    const at::Tensor tokens = at::randint(0, 64, {3, 65}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 64), y = tokens.slice(1, 1);
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      Model model(shape, 1, type);
      scale_matrices(model.parameters(), 4);
      const RotaryTables table = model.rotary(at::arange(64, at::kLong));
      int64_t attended = 0;
      const Attend attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                                const at::Tensor& sinks) {
        ++attended;
        return dense_causal()(q, k, v, layer, sinks);
      };
      std::vector<at::Tensor> losses, gradients;
      std::vector<int64_t> peaks;
      for (const bool recompute : {false, true}) {
        model.set_recompute(recompute);
        zero_gradients(model.parameters());
        attended = 0;
        const auto peak = std::make_shared<PeakBytes>();
        {
          const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, peak);
          const at::Tensor loss = model.loss(x, y.flatten(), table, attend, 1.0 / 192);
          loss.backward();
          losses.push_back(loss.detach());
        }
        EXPECT_EQ(attended, shape.layers);
        gradients.push_back(flat(model.parameters().gradient_views()));
        peaks.push_back(peak->peak());
      }
      EXPECT_TRUE(losses[0].equal(losses[1]));
      EXPECT_TRUE(gradients[0].equal(gradients[1]));
      EXPECT_GT(gradients[0].norm().item<double>(), 0);
      EXPECT_LT(peaks[1], peaks[0] * 2 / 3) << toString(type);
      RecordProperty(std::string("peak_") + toString(type),
                     std::to_string(peaks[1]) + " of " + std::to_string(peaks[0]));
    }
  }
}

// The rows of tiles are computed alike, and only the sums over rows, the gradients of weights, are added in another
// order. With and without recomputation the order is the same.
TEST(Model, TilesComputeTheSameAsAllRowsAtOnce) {
  for (ModelShape shape : {tiny(), tiny(true), rich(), four_norms()}) {
    const at::Tensor tokens = at::randint(0, 64, {3, 66}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 65), y = tokens.slice(1, 1);
    for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
      Model model(shape, 1, type), exact(shape, 1, at::kDouble);
      scale_matrices(model.parameters(), 4);
      fill_vectors(model.parameters());
      copy_values(model.parameters(), exact.parameters());
      const double want = loss_and_gradient(exact, x, y);
      const at::Tensor right = flat(exact.parameters().gradient_views()).to(at::kDouble);
      // As in FusedGradientsEqualThoseOfFp64: about 24 roundings a layer, in any direction, of what the loss depends
      // on.
      const at::Tensor weights = flat(exact.parameters().value_views()).to(at::kDouble);
      const double roundings = std::sqrt(24 * static_cast<double>(shape.layers));
      const double of_loss = testing::unit_roundoff(type) * (want + right.mul(weights).norm().item<double>());
      std::vector<double> errors;
      for (const int64_t tile : {1000, 195, 130, 65, 64, 32, 7, 1}) {
        std::vector<at::Tensor> gradients;
        for (const bool recompute : {false, true}) {
          model.set_tile_rows(tile);
          model.set_recompute(recompute);
          const double loss = loss_and_gradient(model, x, y);
          gradients.push_back(flat(model.parameters().gradient_views()));
          EXPECT_TRUE(testing::within(std::abs(loss - want), testing::kMultiple * roundings * of_loss)) << tile;
        }
        EXPECT_TRUE(gradients[0].equal(gradients[1])) << toString(type) << ", tiles of " << tile;
        errors.push_back(gradients[0].to(at::kDouble).sub(right).norm().item<double>());
        // Sums of bf16 are fp32, so that more tiles are not less exact.
        EXPECT_TRUE(
            testing::within(errors.back(), testing::kMultiple * errors[0] + 1e-12 * right.norm().item<double>()))
            << toString(type) << ", tiles of " << tile;
      }
    }
  }
}

// What is offloaded is what layers keep with recomputation, and the gradients have the same bits.
TEST(Model, OffloadedLayersComputeTheSameBits) {
  for (ModelShape shape : {tiny(), rich(), four_norms()}) {
    shape.layers = 5;
    Model model(shape, 1);
    fill_vectors(model.parameters());
    model.set_recompute(true);
    const at::Tensor tokens = at::randint(0, 64, {3, 66}, at::kLong);
    const at::Tensor x = tokens.slice(1, 0, 65), y = tokens.slice(1, 1);
    for (const int64_t tile : {1000, 30}) {
      model.set_tile_rows(tile);
      model.set_offload(nullptr);
      const double want = loss_and_gradient(model, x, y);
      const at::Tensor right = flat(model.parameters().gradient_views());
      for (const int64_t layers : {1, 3, 5}) {
        Offload offload({.layers = layers}, TierFile::in_folder(::testing::TempDir(), "memory.offload"));
        model.set_offload(&offload);
        // A forward without a backward is forgotten.
        model.loss(x, y.flatten(), model.rotary(at::arange(65, at::kLong)), dense_causal(), 1);
        const int64_t before = offload.stats().bytes_out;
        EXPECT_EQ(loss_and_gradient(model, x, y), want);
        EXPECT_TRUE(flat(model.parameters().gradient_views()).equal(right)) << layers;
        // The input and attention's output of each layer.
        const int64_t kept = 195 * (shape.dim + shape.q_width()) * 4;
        EXPECT_EQ(offload.stats().bytes_out - before, layers * kept);
        EXPECT_EQ(offload.stats().bytes_back, layers * kept);
        // The backward of a forward that another one has followed is an error, not a wrong gradient.
        const auto loss = [&] {
          return model.loss(x, y.flatten(), model.rotary(at::arange(65, at::kLong)), dense_causal(), 1);
        };
        const at::Tensor first = loss(), second = loss();
        expect_error(ErrorKind::kInternal, {"each backward must run before the next forward"},
                     [&] { first.backward(); });
        model.set_offload(nullptr);
      }
    }
  }
}

TEST(Model, WeightsDependOnSeedAndNameAlone) {
  Model a(tiny(), 7);
  ModelShape deeper = tiny();
  deeper.layers = 3;
  Model b(deeper, 7);
  Model c(tiny(), 8);
  const auto find = [](const Model& m, const std::string& name) {
    for (const NamedTensor& t : m.parameters().value_views()) {
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
  // The standard deviation of n elements varies by its share 1 / sqrt(2 n).
  for (const auto& [of, std] : {std::pair("lm_head.weight", 0.02), {"model.layers.0.mlp.down_proj.weight", 0.01}}) {
    const at::Tensor weight = find(a, of);
    const double vary = 1 / std::sqrt(2 * static_cast<double>(weight.numel()));
    EXPECT_NEAR(weight.std().item<double>(), std, 6 * vary * std) << of;
  }
}

// Also where a norm multiplies by 1 + weight.
TEST(Model, NormsBeginByMultiplyingByOne) {
  for (const ModelShape& shape : {rich(), four_norms()}) {
    const Model model(shape, 1);
    int64_t norms = 0;
    for (const NamedTensor& t : model.parameters().value_views()) {
      if (t.name.find("norm") == std::string::npos) continue;
      EXPECT_TRUE(t.tensor.eq(1 - shape.norm_offset()).all().item<bool>()) << t.name;
      ++norms;
    }
    EXPECT_EQ(norms, shape.post_norms ? 2 * 6 + 1 : 2 * 4 + 1);
  }
}

TEST(Model, ParameterCountEqualsThatOfTheModel) {
  for (const bool tied : {false, true}) {
    for (const ModelShape& shape : {tiny(tied), rich(tied), four_norms(tied)}) {
      EXPECT_EQ(parameter_count(shape), Model(shape, 1).parameters().count());
    }
  }
}

TEST(Model, UnitsHoldEachParameterOnce) {
  for (const ModelShape& shape : {tiny(false), tiny(true), rich(false), rich(true), four_norms(true)}) {
    for (const int parts : {1, 3, 4}) {
      Parameters parameters(described_units(shape));
      parameters.lay_out(parts);
      ASSERT_EQ(parameters.units().size(), shape.tie_embeddings ? 5U : 6U);
      std::set<std::string> names;
      size_t next = 0;
      for (const ParameterUnit& unit : parameters.units()) {
        EXPECT_EQ(unit.first, next) << unit.name;
        next = unit.last;
        int64_t end = 0;
        for (size_t i = unit.first; i < unit.last; ++i) {
          const ParameterInfo& p = parameters.list()[i];
          EXPECT_TRUE(names.insert(p.name).second) << p.name;
          EXPECT_GE(p.offset, end);
          EXPECT_LT(p.offset, end + Parameters::kAlign) << "padding is no larger than the alignment requires";
          EXPECT_EQ(p.shape.size() == 2, p.offset < unit.decayed) << p.name;
          end = p.offset + p.count();
        }
        EXPECT_EQ(unit.decayed % Parameters::kAlign, 0);
        EXPECT_EQ(unit.elements % (Parameters::kAlign * parts), 0);
        EXPECT_GE(unit.elements, end);
        EXPECT_LT(unit.elements, end + Parameters::kAlign * parts);
      }
      EXPECT_EQ(next, parameters.list().size());
      EXPECT_EQ(names.count("lm_head.weight"), shape.tie_embeddings ? 0U : 1U);
    }
  }
}

TEST(Model, PartsOfUnitsHaveTheWeightsOfTheWhole) {
  const Model whole(tiny(), 5);
  const Parameters& p = whole.parameters();
  for (size_t unit = 0; unit < p.units().size(); ++unit) {
    const int64_t elements = p.units()[unit].elements;
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, elements}, {elements / 3, elements / 2}, {7, 8}}) {
      const at::Tensor part = at::empty({end - begin}, at::kDouble);
      p.initialize(5, unit, begin, part);
      EXPECT_TRUE(part.equal(p.values(unit).tensor().slice(0, begin, end).to(at::kDouble))) << unit << " " << begin;
    }
  }
}

// The rotary settings of a layer are those of its entry in a list that repeats.
TEST(Model, LayersRotateByTheirOwnSettings) {
  ModelShape shape = tiny();
  shape.layers = 5;
  shape.rope_theta = 1e6;
  shape.rope_scaling = {.kind = RotaryScaling::Kind::kLinear, .factor = 8};
  EXPECT_EQ(shape.rotaries().distinct, std::vector<RotarySpec>{shape.rotary()});
  shape.rope_layers.cycle = {
      {.own = true, .theta = 1e4}, {}, {.own = true, .scaling = {.kind = RotaryScaling::Kind::kNone}}};
  const ModelShape::Rotaries of = shape.rotaries();
  EXPECT_EQ(of.of_layer, (std::vector<size_t>{0, 1, 2, 0, 1}));
  EXPECT_EQ(of.distinct[0], (RotarySpec{.head_dim = 8, .theta = 1e4}));
  EXPECT_EQ(of.distinct[1], shape.rotary());
  const RotaryTables tables = Model(shape, 1).rotary(at::arange(9, at::kLong));
  EXPECT_TRUE(tables.of(3).cosine.equal(
      make_rotary_table(at::arange(9, at::kLong), of.distinct[0], at::kFloat, at::kCPU).cosine));
  EXPECT_FALSE(tables.of(3).cosine.equal(tables.of(1).cosine));
  // A layer without positions rotates by angles of 0, which change no bit.
  EXPECT_TRUE(tables.of(2).cosine.eq(1).all().item<bool>());
  EXPECT_TRUE(tables.of(2).sine.eq(0).all().item<bool>());
}

// The factor is rounded to the dtype that is computed in: the square root of 3,072 is 55.43, and in bf16 55.5.
TEST(Model, ScaledEmbeddingsAreMultipliedByTheRoundedRoot) {
  ModelShape shape{.layers = 1, .dim = 3072, .heads = 1, .kv_heads = 1, .ffn = 2, .vocab = 4, .head_size = 2};
  shape.scale_embeddings = true;
  shape.norm_eps = 0x1p40;  // so large that the final norm divides by about 2^20, and in bf16 by no other number
  for (const auto& [type, root] : {std::pair(at::kBFloat16, 55.5), {at::kDouble, std::sqrt(3072.0)}}) {
    Model model(shape, 1, type);
    for (const NamedTensor& t : model.parameters().value_views()) {
      if (t.tensor.dim() == 2) at::Tensor(t.tensor).fill_(t.name.find("embed") != std::string::npos ? 1.375 : 0);
    }
    const at::Tensor hidden =
        model.hidden(at::zeros({1, 1}, at::kLong), model.rotary(at::zeros({1}, at::kLong)), dense_causal()).detach();
    const double want = at::scalar_tensor(1.375 * root, at::TensorOptions(type)).item<double>();
    const double divisor = type == at::kDouble ? std::sqrt(want * want + 0x1p40) : 0x1p20;
    EXPECT_NEAR(hidden[0][0].item<double>(), want / divisor, testing::kExact * want / divisor) << type;
  }
}

TEST(Model, LastOnlyGivesTheLogitsOfTheLastPosition) {
  const Model model(tiny(), 2, at::kDouble);
  const at::Tensor tokens = at::randint(0, 64, {3, 11}, at::kLong);
  const RotaryTables table = model.rotary(at::arange(11, at::kLong));
  const at::Tensor all = model.logits(tokens, table, dense_causal()).view({3, 11, 64}).select(1, 10);
  const at::Tensor last = model.logits(tokens, table, dense_causal(), /*last_only=*/true);
  EXPECT_TRUE(testing::agrees(last, all.detach()));
}

TEST(Model, RefusesInvalidShapes) {
  for (const auto& change : std::vector<std::function<void(ModelShape&)>>{
           [](ModelShape& s) { s.layers = 0; }, [](ModelShape& s) { s.heads = 3; }, [](ModelShape& s) { s.dim = 36; },
           [](ModelShape& s) { s.kv_heads = 3; }, [](ModelShape& s) { s.vocab = -1; },
           [](ModelShape& s) { s.head_size = 7; }, [](ModelShape& s) { s.head_size = -2; },
           [](ModelShape& s) { s.rope_layers.cycle.resize(3); }}) {
    ModelShape shape = tiny();
    change(shape);
    expect_error(ErrorKind::kPlan, {}, [&] { validate(shape); });
  }
}

}  // namespace
}  // namespace annulus::model_test
