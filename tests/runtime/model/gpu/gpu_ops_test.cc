// Compares the kernels for GPUs, on a GPU or on a CPU by fibers (place.h), with the same operations in fp64 and fp32:
// every dtype, rows of one element to many more than a group of threads keeps, addresses that are not aligned, no rows
// at all, targets that do not count. Everything is computed twice with the same bits, on fibers in both orders of the
// threads.
#include "runtime/model/choose_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "attention/modules/rotary.h"
#include "tests/common/exactness.h"
#include "tests/runtime/model/gpu/place.h"

namespace annulus {
namespace {

using testing::FiberLauncher;
using Tensors = std::vector<at::Tensor>;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// The least error of rounding a number to the type, where it is subnormal.
double rounding_near_zero(at::ScalarType type) { return type == at::kHalf ? 0x1p-25 : 0x1p-134; }

// The same on the CPU in another dtype.
at::Tensor as(at::ScalarType type, const at::Tensor& t) { return t.defined() ? t.to(at::kCPU, type) : t; }
NormWeight as(at::ScalarType type, const NormWeight& w) { return {as(type, w.weight), w.offset}; }
at::Tensor wide(const at::Tensor& t) { return as(at::kDouble, t); }

// Each element may be off by its own rounding, and by a multiple of the largest error that a plain computation in fp32
// has (exactness.h).
void expect_near(const at::Tensor& got, const at::Tensor& exact, double plain, const std::string& what) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), exact.sizes()) << what;
  const double unit = testing::unit_roundoff(got.scalar_type());
  const at::Tensor rounded = exact.abs().mul(unit).clamp_min(rounding_near_zero(got.scalar_type()));
  const at::Tensor beyond = wide(got).sub(exact).abs().sub(rounded).clamp_min(0);
  EXPECT_TRUE(testing::within(testing::error_of(beyond, at::zeros_like(beyond)), testing::kMultiple * plain))
      << what << ", " << toString(got.scalar_type());
}

// Expects results that are as exact as those of LibTorch's operators in fp32. `compute` computes in the given dtype.
// Elements pass through several operations, so that a few roundings of the largest one are allowed in any case, or of
// `terms` for each result, where larger terms cancel.
void expect_as_composed(const Tensors& got, const std::function<Tensors(at::ScalarType)>& compute,
                        const std::string& what, std::vector<double> terms = {}) {
  constexpr double kRoundings = 3;
  terms.resize(got.size());
  const Tensors exact = compute(at::kDouble), usual = compute(at::kFloat);
  ASSERT_EQ(got.size(), exact.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    const double size = std::max(terms[i], testing::largest(exact[i]));
    const double roundings = kRoundings * testing::unit_roundoff(at::kFloat) * size;
    expect_near(got[i], exact[i], testing::error_of(usual[i], exact[i]) + roundings, what + ", " + std::to_string(i));
  }
}

class GpuOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = place.obstacle(); !why.empty()) GTEST_SKIP() << why;
  }

  // Random numbers of a type that begin where a vector may, or one element later.
  at::Tensor random(at::IntArrayRef sizes, at::ScalarType type, bool aligned = true) const {
    const int64_t n = c10::multiply_integers(sizes), first = aligned ? 0 : 1;
    return at::randn({n + first}, at::kDouble).to(place.device(), type).narrow(0, first, n).view(sizes);
  }

  // Computes twice and expects the same bits; on fibers with the threads in their order and backwards. Leaves in
  // `started` what the first order started.
  Tensors twice(const std::function<Tensors()>& compute) {
    FiberLauncher* const fibers = place.fibers();
    if (fibers != nullptr) fibers->started.clear(), fibers->backwards = false;
    const Tensors first = compute();
    if (fibers != nullptr) started = fibers->started, fibers->backwards = true;
    const Tensors second = compute();
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_TRUE(!first[i].defined() || first[i].equal(second[i])) << "result " << i << " depends on the order";
    }
    return first;
  }

  testing::Place& place = testing::place();
  std::vector<FiberLauncher::Started> started;  // empty on a GPU
  const DecoderOps& kernels = kernel_ops();
  const DecoderOps& composed = composed_ops();
};

struct Width {
  int64_t dim;
  bool aligned = true;
};

// A warp keeps 256 elements of fp32, and groups of 8 and 16 warps 2,048 and 4,096; twice as many of 16 bits.
constexpr Width kWidths[] = {{1},    {3},    {8},    {64},   {64, false}, {100},
                             {512},  {520},  {1024}, {1032}, {2048},      {2048, false},
                             {4096}, {4097}, {4104}, {8200}, {16400},     {17000, false}};

TEST_F(GpuOps, RmsNorm) {
  bool residual = false;  // in turn: each type and each width meets both
  for (const at::ScalarType type : kTypes) {
    residual = !residual;
    for (const auto& [dim, aligned] : kWidths) {
      const std::string what =
          "dim " + std::to_string(dim) + (aligned ? "" : ", not aligned") + (residual ? ", with a residual" : "");
      const int64_t rows = dim > 4000 ? 3 : 7;
      const at::Tensor x = random({rows, dim}, type, aligned);
      const NormWeight weight(random({dim}, type), residual ? 1 : 0);
      const at::Tensor delta = residual ? random({rows, dim}, type) : at::Tensor();
      const Tensors got = twice([&]() -> Tensors {
        const RmsNorm r = kernels.add_rms_norm(x, delta, weight, 1e-5);
        return {r.sum, r.y, r.inv_rms};
      });
      const bool vectors = aligned && dim * x.element_size() % 16 == 0;
      const bool several = vectors && dim * x.element_size() <= 256;  // four rows at once
      for (const FiberLauncher::Started& s : started) {
        EXPECT_EQ(s.vectors, vectors) << what;
        EXPECT_EQ(s.groups, several ? 2 : rows) << what;
      }
      if (residual) {
        expect_near(got[0], wide(x) + wide(delta), /*plain=*/0, what + ": sum");
      } else {
        EXPECT_TRUE(got[0].is_same(x));
      }
      // The statistics are those of the rounded sum.
      const auto want = [&](at::ScalarType t) -> Tensors {
        const RmsNorm r = composed.add_rms_norm(as(t, got[0]), {}, as(t, weight), 1e-5);
        return {r.y, r.inv_rms};
      };
      expect_as_composed({got[1], got[2].view({rows, 1})}, want, what + ": y and statistics");
      residual = !residual;
    }
  }
}

TEST_F(GpuOps, RmsNormGradient) {
  bool residual = false;  // in turn: each type and each width meets both
  for (const at::ScalarType type : kTypes) {
    residual = !residual;
    for (const auto& [dim, aligned] : kWidths) {
      const std::string what = "dim " + std::to_string(dim) + (aligned ? "" : ", not aligned") +
                               (residual ? ", with a gradient of the sum" : "");
      const int64_t rows = dim > 4000 ? 3 : 7;
      const at::Tensor sum = random({rows, dim}, type, aligned);
      const NormWeight weight(random({dim}, type), residual ? 1 : 0);
      const at::Tensor dy = random({rows, dim}, type);
      const at::Tensor dsum = residual ? random({rows, dim}, type) : at::Tensor();
      const at::Tensor inv_rms = composed.add_rms_norm(wide(sum), {}, as(at::kDouble, weight), 1e-5).inv_rms;
      const Tensors got = twice([&]() -> Tensors {
        const RmsNormGradient r =
            kernels.add_rms_norm_backward(dy, dsum, sum, weight, inv_rms.to(place.device(), at::kFloat).view({rows}));
        return {r.dx, r.dweight};
      });
      EXPECT_EQ(got[1].scalar_type(), at::kFloat) << what;  // a tile's part is not rounded
      if (!started.empty()) {
        EXPECT_EQ(started[0].vectors, aligned && dim * sum.element_size() % 16 == 0) << what;
      }
      const auto want = [&](at::ScalarType t) -> Tensors {
        const RmsNormGradient r = composed.add_rms_norm_backward(as(t, dy), as(t, dsum), as(t, sum), as(t, weight),
                                                                 as(t, as(at::kFloat, inv_rms)));
        return {r.dx, r.dweight};
      };
      // In a row of one element the terms of dx cancel.
      const double terms = testing::largest(wide(dy) * (wide(weight.weight) + weight.offset) * inv_rms);
      expect_as_composed(got, want, what, {dim == 1 ? terms : 0});
      residual = !residual;
    }
  }
}

// A group computes several rows if there are more than groups, and each group has a row of the sums.
TEST_F(GpuOps, RmsNormGradientOfManyRows) {
  for (const auto& [rows, dim] :
       {std::pair<int64_t, int64_t>{9000, 8}, {1100, 520}, {400, 2048}, {300, 4104}, {700, 1030}}) {
    const at::Tensor sum = random({rows, dim}, at::kFloat), weight = random({dim}, at::kFloat);
    const at::Tensor dy = random({rows, dim}, at::kFloat);
    const at::Tensor inv_rms = composed.add_rms_norm(wide(sum), {}, wide(weight), 1e-5).inv_rms;
    const Tensors got = twice([&]() -> Tensors {
      const RmsNormGradient r =
          kernels.add_rms_norm_backward(dy, {}, sum, weight, inv_rms.to(place.device(), at::kFloat).view({rows}));
      return {r.dx, r.dweight};
    });
    const auto want = [&](at::ScalarType t) -> Tensors {
      const RmsNormGradient r =
          composed.add_rms_norm_backward(as(t, dy), {}, as(t, sum), as(t, weight), as(t, as(at::kFloat, inv_rms)));
      return {r.dx, r.dweight};
    };
    expect_as_composed(got, want, "rows " + std::to_string(rows) + ", dim " + std::to_string(dim));
    if (started.empty()) continue;
    EXPECT_EQ(started[0].groups, 2112 / started[0].warps);
    EXPECT_EQ(kernel_norm_sums(rows, dim, at::kFloat), started[0].groups * dim * 4);
  }
}

// The loops for CPUs and the kernels have the same interfaces, and the same results up to rounding.
TEST_F(GpuOps, LoopsForCpusAndKernelsComputeTheSame) {
  const at::Tensor x = random({9, 200}, at::kFloat), delta = random({9, 200}, at::kFloat);
  const at::Tensor weight = random({200}, at::kFloat), dy = random({9, 200}, at::kFloat);
  const at::Tensor gate_up = random({5, 66}, at::kFloat), dout = random({5, 33}, at::kFloat);
  const at::Tensor logits = random({4, 300}, at::kFloat), targets = at::randint(-1, 300, {4}, at::kLong);
  const RotaryTable table = make_rotary_table(at::arange(9, at::kLong), {.head_dim = 40}, at::kFloat, at::kCPU);
  const auto all = [&](const DecoderOps& ops, at::Device device, at::ScalarType t) -> Tensors {
    const auto in = [&](const at::Tensor& of) { return of.to(device, t, /*non_blocking=*/false, /*copy=*/true); };
    const NormWeight centered(in(weight), 1);
    const RmsNorm n = ops.add_rms_norm(in(x), in(delta), centered, 1e-5);
    const RmsNormGradient g = ops.add_rms_norm_backward(in(dy), in(delta), n.sum, centered, n.inv_rms);
    const Heads h = ops.rotary_split(in(x), in(table.cosine), in(table.sine), 1, 2);
    const CrossEntropy c = ops.cross_entropy(in(logits), targets.to(device), {}, 0.3, t);
    Tensors results = {n.sum, n.y, g.dx, g.dweight, h.q, h.k, h.v, c.dlogits, c.loss};
    for (const Activation of : {Activation::kSilu, Activation::kGeluTanh}) {
      results.push_back(ops.glu(in(gate_up), of));
      results.push_back(ops.glu_backward(in(dout), in(gate_up), of));
    }
    return results;
  };
  const auto want = [&](at::ScalarType t) { return all(composed, at::kCPU, t); };
  expect_as_composed(all(kernels, place.device(), at::kFloat), want, "kernels");
  expect_as_composed(all(loop_ops(), at::kCPU, at::kFloat), want, "loops");
}

TEST_F(GpuOps, HeadNorm) {
  const int64_t rows = 6, heads = 3, kv = 2;
  for (const at::ScalarType type : kTypes) {
    for (const int64_t d : {6, 64, 128}) {
      const std::string what = "head size " + std::to_string(d);
      const at::Tensor qkv = random({rows, (heads + 2 * kv) * d}, type);
      const NormWeight q(random({d}, type), d == 64 ? 1 : 0), k(random({d}, type), d == 64 ? 1 : 0);
      const at::Tensor dy = random(qkv.sizes(), type);
      const Tensors got = twice([&]() -> Tensors {
        const HeadNormed r = kernels.head_norm(qkv, q, k, heads, kv, 1e-6);
        const HeadNormGradient g = kernels.head_norm_backward(dy, qkv, q, k, r.inv_rms, heads);
        return {r.y, r.inv_rms, g.dqkv, g.dq_weight, g.dk_weight};
      });
      const auto want = [&](at::ScalarType t) -> Tensors {
        const HeadNormed r = composed.head_norm(as(t, qkv), as(t, q), as(t, k), heads, kv, 1e-6);
        const HeadNormGradient g =
            composed.head_norm_backward(as(t, dy), as(t, qkv), as(t, q), as(t, k), r.inv_rms, heads);
        return {r.y, r.inv_rms, g.dqkv, g.dq_weight, g.dk_weight};
      };
      expect_as_composed(got, want, what);
    }
  }
}

TEST_F(GpuOps, Rotary) {
  const int64_t batch = 2, n = 5, heads = 3, kv = 2;
  for (const at::ScalarType type : kTypes) {
    for (const auto& [d, aligned] : {Width{2}, {6}, {12}, {24}, {64}, {64, false}, {80}, {128}, {256}}) {
      const std::string what = "head size " + std::to_string(d) + (aligned ? "" : ", not aligned");
      const RotaryTable table =
          make_rotary_table(at::arange(n, at::kLong).mul(37).add(3), {.head_dim = d}, at::kFloat, place.device());
      const at::Tensor qkv = random({batch * n, (heads + 2 * kv) * d}, type, aligned);
      const Heads dheads{random({batch, n, heads, d}, type), random({batch, n, kv, d}, type),
                         random({batch, n, kv, d}, type, aligned)};
      const Tensors got = twice([&]() -> Tensors {
        const Heads h = kernels.rotary_split(qkv, table.cosine, table.sine, heads, kv);
        return {h.q, h.k, h.v, kernels.rotary_split_backward(dheads, table.cosine, table.sine)};
      });
      const bool vectors = aligned && d / 2 * qkv.element_size() % 16 == 0;
      for (const FiberLauncher::Started& s : started) EXPECT_EQ(s.vectors, vectors) << what;
      const auto want = [&](at::ScalarType t) -> Tensors {
        const at::Tensor c = as(t, table.cosine), s = as(t, table.sine);
        const Heads h = composed.rotary_split(as(t, qkv), c, s, heads, kv);
        return {h.q, h.k, h.v,
                composed.rotary_split_backward({as(t, dheads.q), as(t, dheads.k), as(t, dheads.v)}, c, s)};
      };
      expect_as_composed(got, want, what);
      EXPECT_TRUE(wide(got[2]).equal(want(at::kDouble)[2])) << what;
    }
  }
}

TEST_F(GpuOps, GatedProducts) {
  for (const Activation of : {Activation::kSilu, Activation::kGeluTanh}) {
    for (const at::ScalarType type : kTypes) {
      for (const auto& [ffn, aligned] : {Width{1}, {16}, {16, false}, {45}, {2048}, {2048, false}, {3000}, {8192}}) {
        const std::string what =
            std::string(activation_name(of)) + ", width " + std::to_string(ffn) + (aligned ? "" : ", not aligned");
        const at::Tensor gate_up = random({3, 2 * ffn}, type, aligned).mul_(6), dout = random({3, ffn}, type);
        const Tensors got = twice([&]() -> Tensors {
          return {kernels.glu(gate_up, of), kernels.glu_backward(dout, gate_up, of)};
        });
        const bool vectors = aligned && ffn * dout.element_size() % 16 == 0;
        for (const FiberLauncher::Started& s : started) EXPECT_EQ(s.vectors, vectors) << what;
        const auto want = [&](at::ScalarType t) -> Tensors {
          return {composed.glu(as(t, gate_up), of), composed.glu_backward(as(t, dout), as(t, gate_up), of)};
        };
        expect_as_composed(got, want, what);
      }
    }
  }
}

TEST_F(GpuOps, CrossEntropy) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& [vocab, aligned] :
         {Width{1}, {2}, {7}, {256}, {256, false}, {1021}, {4096}, {4096, false}, {5000}, {50257}, {131072}}) {
      const std::string what = "vocabulary of " + std::to_string(vocab) + (aligned ? "" : ", not aligned");
      const int64_t rows = 4;
      const at::Tensor logits = random({rows, vocab}, at::kFloat, aligned).mul_(3);
      at::Tensor targets = at::randint(0, vocab, {rows}, at::kLong);
      targets[0] = 0;
      targets[1] = -1;
      targets[3] = vocab - 1;
      const at::Tensor on_device = targets.to(place.device());
      at::Tensor weights = at::rand({rows}).mul_(2);
      const at::Tensor its_weights = weights.to(place.device());
      // A copy that is aligned in the same way.
      const auto copy = [&] { return random({rows, vocab}, at::kFloat, aligned).copy_(logits); };
      const Tensors got = twice([&]() -> Tensors {
        at::Tensor handed_over = copy();
        const void* const memory = handed_over.const_data_ptr();
        const CrossEntropy r = kernels.cross_entropy(std::move(handed_over), on_device, its_weights, 0.25, type);
        EXPECT_EQ(r.dlogits.const_data_ptr(), memory);
        EXPECT_EQ(r.dlogits.scalar_type(), type);
        return {r.loss, r.dlogits.clone()};
      });
      for (const FiberLauncher::Started& s : started) {
        EXPECT_EQ(s.vectors, aligned && vocab % 4 == 0) << what;
        EXPECT_EQ(s.warps, vocab < 4096 ? 8 : 32) << what;
      }
      const auto want = [&](at::ScalarType t) -> Tensors {
        const CrossEntropy r = composed.cross_entropy(as(t, logits).clone(), targets, weights, 0.25, t);
        return {r.loss, r.dlogits};
      };
      expect_as_composed(got, want, what);
      EXPECT_EQ(got[1][1].abs().max().item<double>(), 0) << "the row does not count";
      const at::Tensor untouched = copy();
      const CrossEntropy without = kernels.cross_entropy(untouched, on_device, its_weights, 0.25, std::nullopt);
      EXPECT_EQ(without.loss.item<double>(), got[0].item<double>()) << what;
      EXPECT_FALSE(without.dlogits.defined());
      EXPECT_TRUE(untouched.equal(logits)) << what;
    }
  }
}

TEST_F(GpuOps, CrossEntropyOfLogitsFarFromZeroAndNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const at::Tensor target = at::full({1}, 2, at::kLong).to(place.device());
  const auto loss = [&](const at::Tensor& logits) {
    return kernels.cross_entropy(logits.to(place.device()).clone(), target, {}, 1, at::kFloat).loss.item<double>();
  };
  // The exponentials are exactly 1 and so is their sum, and a logarithm is off by at most four roundings.
  const double of_log = 4 * testing::unit_roundoff(at::kFloat) * std::log(5000.0);
  EXPECT_NEAR(loss(at::full({1, 5000}, 3e4F)), std::log(5000.0), of_log);
  EXPECT_NEAR(loss(at::full({1, 5000}, -3e4F)), std::log(5000.0), of_log);
  const at::Tensor masked = at::full({1, 5000}, -kInfinity);  // whole threads have no finite logit
  masked.narrow(1, 0, 4).zero_();
  EXPECT_NEAR(loss(masked), std::log(4.0), of_log);
  masked.narrow(1, 4999, 1).fill_(std::nanf(""));
  EXPECT_TRUE(std::isnan(loss(masked)));
  EXPECT_TRUE(std::isnan(loss(at::full({1, 5000}, -kInfinity))));
}

// Nothing is launched, and the gradient of a weight is 0.
TEST_F(GpuOps, NoRows) {
  const at::Tensor none = at::empty({0, 16}).to(place.device()), weight = at::ones({16}).to(place.device());
  EXPECT_EQ(kernels.add_rms_norm(none, none, weight, 1e-5).y.numel(), 0);
  const RmsNormGradient g = kernels.add_rms_norm_backward(none, none, none, weight, none.view({0}));
  EXPECT_EQ(g.dweight.abs().max().item<double>(), 0);
  EXPECT_EQ(kernels.glu(none, Activation::kSilu).numel(), 0);
  const at::Tensor targets = at::empty({0}, at::kLong).to(place.device());
  EXPECT_EQ(kernels.cross_entropy(none, targets, {}, 1, at::kFloat).loss.item<double>(), 0);
  EXPECT_FALSE(kernels_take(none));
}

TEST_F(GpuOps, TakesWhatItCanCompute) {
  const auto ones = [&](at::ScalarType type) { return at::ones({2, 3}, type).to(place.device()); };
  for (const at::ScalarType type : kTypes) EXPECT_TRUE(kernels_take(ones(type)));
  EXPECT_FALSE(kernels_take(ones(at::kDouble)));
  EXPECT_FALSE(kernels_take(ones(at::kFloat).t()));
  if (place.fibers() == nullptr) return;
  gpu::set_cpu_launcher(nullptr);
  EXPECT_FALSE(kernels_take(ones(at::kFloat))) << "nobody starts them on a CPU";
  gpu::set_cpu_launcher(place.fibers());
}

}  // namespace
}  // namespace annulus
