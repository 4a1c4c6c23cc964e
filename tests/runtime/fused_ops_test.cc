// The fused fp32 operations, values and gradients, against the same mathematics in fp64 (which takes the composed
// path), and that composition against finite differences.
#include "runtime/fused_ops.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/error.h"

namespace annulus {
namespace {

using Tensors = std::vector<at::Tensor>;
using Op = std::function<Tensors(const Tensors&)>;

// Runs op on inputs in a dtype; returns its outputs and the gradients of sum(output_i * probe_i).
struct Run {
  Tensors outputs;
  Tensors gradients;
};
Run run(const Op& op, const Tensors& inputs, at::ScalarType dtype, const Tensors& probes) {
  Tensors leaves;
  for (const at::Tensor& t : inputs) leaves.push_back(t.to(dtype, false, /*copy=*/true).set_requires_grad(true));
  Run r{.outputs = op(leaves), .gradients = {}};
  at::Tensor total;
  for (size_t i = 0; i < r.outputs.size(); ++i) {
    if (!probes[i].defined()) continue;
    const at::Tensor term = r.outputs[i].mul(probes[i].to(dtype)).sum();
    total = total.defined() ? total.add(term) : term;
  }
  total.backward();
  for (const at::Tensor& t : leaves) r.gradients.push_back(t.grad());
  return r;
}

void expect_near(const at::Tensor& got, const at::Tensor& want, double tolerance, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const double scale = std::max(1e-3, want.abs().max().item<double>());
  EXPECT_LE(got.to(at::kDouble).sub(want.to(at::kDouble)).abs().max().item<double>(), tolerance * scale) << what;
}

// fp32 against fp64, and fp64 against central differences along a random direction of each input.
void check(const Op& op, const Tensors& inputs, const Tensors& probes) {
  const Run exact = run(op, inputs, at::kDouble, probes);
  const Run fused = run(op, inputs, at::kFloat, probes);
  for (size_t i = 0; i < exact.outputs.size(); ++i) {
    expect_near(fused.outputs[i].detach(), exact.outputs[i].detach(), 3e-6, "output " + std::to_string(i));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_near(fused.gradients[i], exact.gradients[i], 1e-5, "gradient " + std::to_string(i));
    const at::Tensor direction = at::randn(inputs[i].sizes(), at::kDouble);
    const auto value = [&](double h) {
      Tensors moved = inputs;
      for (at::Tensor& t : moved) t = t.to(at::kDouble);
      moved[i] = moved[i].add(direction, h);
      const Tensors outputs = op(moved);
      double total = 0;
      for (size_t o = 0; o < outputs.size(); ++o) {
        if (probes[o].defined()) total += outputs[o].mul(probes[o].to(at::kDouble)).sum().item<double>();
      }
      return total;
    };
    const double h = 1e-5;
    const double numeric = (value(h) - value(-h)) / (2 * h);
    const double analytic = exact.gradients[i].mul(direction).sum().item<double>();
    EXPECT_NEAR(numeric, analytic, 1e-6 * std::max(1.0, std::abs(analytic))) << "gradient " << i;
  }
}

TEST(FusedOps, RmsNormWithResidual) {
  for (const int64_t dim : {4, 33, 256}) {
    const Tensors in{at::randn({37, dim}), at::randn({37, dim}), at::randn({dim})};
    const Tensors probes{at::randn({37, dim}), at::randn({37, dim})};
    const Op op = [](const Tensors& t) {
      const Normed n = add_rms_norm(t[0], t[1], t[2], 1e-5);
      return Tensors{n.sum, n.y};
    };
    check(op, in, probes);
    check(op, in, {at::Tensor(), probes[1]});  // the sum is used nowhere else
  }
}

TEST(FusedOps, RmsNormWithoutResidual) {
  check(
      [](const Tensors& t) {
        const Normed n = add_rms_norm(t[0], at::Tensor(), t[1], 1e-5);
        return Tensors{n.sum, n.y};
      },
      {at::randn({5, 48}), at::randn({48})}, {at::randn({5, 48}), at::randn({5, 48})});
}

TEST(FusedOps, RotarySplit) {
  const int64_t n = 7;
  const int64_t heads = 4;
  const int64_t kv = 2;
  const int64_t d = 6;
  const at::Tensor positions = at::arange(n, at::kLong).mul(37).add(3);
  check(
      [&](const Tensors& t) {
        const RotaryTable table = make_rotary_table(positions, d, 10000, t[0].scalar_type(), at::kCPU);
        const Heads h = rotary_split(t[0], table, heads, kv);
        return Tensors{h.q, h.k, h.v};
      },
      {at::randn({3 * n, (heads + 2 * kv) * d})},
      {at::randn({3, n, heads, d}), at::randn({3, n, kv, d}), at::randn({3, n, kv, d})});
}

TEST(FusedOps, RotaryScoresDependOnDistanceAlone) {
  const at::Tensor qkv = at::randn({1, 3 * 8}).expand({4, 24}).contiguous();
  const RotaryTable table = make_rotary_table(at::arange(4, at::kLong).mul(5).add(100), 8, 10000, at::kFloat, at::kCPU);
  const Heads h = rotary_split(qkv, table, 1, 1);
  const auto score = [&](int64_t i, int64_t j) { return h.q.select(1, i).mul(h.k.select(1, j)).sum().item<double>(); };
  EXPECT_NEAR(score(1, 0), score(3, 2), 1e-4);
  EXPECT_NEAR(score(2, 0), score(3, 1), 1e-4);
}

TEST(FusedOps, SwiGlu) {
  for (const int64_t ffn : {1, 16, 45}) {
    check([](const Tensors& t) { return Tensors{swiglu(t[0])}; }, {at::randn({9, 2 * ffn}).mul(6)},
          {at::randn({9, ffn})});
  }
}

TEST(FusedOps, SwiGluOfHugeGates) {
  const at::Tensor in = at::full({1, 4}, 2.0F);
  in.select(1, 0).fill_(-1000);
  in.select(1, 1).fill_(1000);
  const at::Tensor out = swiglu(in);
  EXPECT_NEAR(out[0][0].item<double>(), 0, 1e-30);
  EXPECT_NEAR(out[0][1].item<double>(), 2000, 1e-3);
}

TEST(FusedOps, CrossEntropy) {
  const at::Tensor targets = at::randint(0, 19, {50}, at::kLong);
  for (const double scale : {1.0, 0.02}) {
    check([&](const Tensors& t) { return Tensors{cross_entropy_sum(t[0], targets, scale)}; },
          {at::randn({50, 19}).mul(4)}, {at::full({}, 1.0)});
    check([&](const Tensors& t) { return Tensors{cross_entropy_sum(t[0], targets, scale)}; },
          {at::randn({50, 19}).mul(4)}, {at::full({}, -2.5)});
  }
}

TEST(FusedOps, CrossEntropyRefusesTargetsOutsideTheVocabulary) {
  EXPECT_THROW(cross_entropy_sum(at::randn({2, 8}), at::full({2}, 8, at::kLong), 1), Error);
  EXPECT_THROW(cross_entropy_sum(at::randn({2, 8}), at::full({2}, -1, at::kLong), 1), Error);
}

TEST(FusedOps, NotANumberStaysOne) {
  at::Tensor logits = at::randn({3, 8});
  logits[1][2] = std::nan("");
  EXPECT_TRUE(std::isnan(cross_entropy_sum(logits, at::zeros({3}, at::kLong), 1).item<double>()));
  at::Tensor x = at::randn({3, 8});
  x[0][0] = std::nan("");
  EXPECT_TRUE(std::isnan(add_rms_norm(x, {}, at::ones({8}), 1e-5).y.sum().item<double>()));
  EXPECT_TRUE(std::isnan(swiglu(x).sum().item<double>()));
}

}  // namespace
}  // namespace annulus
