// Compares the kernels for GPUs, on a GPU or on a CPU by fibers (place.h), with the same operations in fp64: every
// dtype, rows of one element to many more than a group of threads keeps, addresses that are not aligned, no rows at
// all, targets that do not count. Everything is computed twice with the same bits, on fibers in both orders of the
// threads.
#include "model/gpu_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "model/composed_ops.h"
#include "model/loop_ops.h"
#include "modules/rotary.h"
#include "tests/model/gpu/place.h"

namespace annulus {
namespace {

using testing::FiberLauncher;
using Tensors = std::vector<at::Tensor>;

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

// The relative error of a number that is rounded to the type, and the absolute one where that is larger because the
// number is subnormal.
double rounding(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-8;  // bf16
  }
}
double rounding_near_zero(at::ScalarType type) { return type == at::kHalf ? 0x1p-25 : 0x1p-134; }

// The same on the CPU in fp64.
at::Tensor wide(const at::Tensor& t) { return t.defined() ? t.to(at::kCPU, at::kDouble) : t; }

// Each element may be off by its own rounding, and by `relative` of the largest, or of `terms` if what it is computed
// from is larger.
void expect_near(const at::Tensor& got, const at::Tensor& want, double relative, const std::string& what,
                 double terms = 1e-3) {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  if (got.numel() == 0) return;
  const double scale = std::max(terms, want.abs().max().item<double>());
  const at::Tensor rounded =
      want.abs().mul(rounding(got.scalar_type())).clamp_min(rounding_near_zero(got.scalar_type()));
  const at::Tensor allowed = rounded.add(relative * scale);
  EXPECT_LE(wide(got).sub(want).abs().sub(allowed).max().item<double>(), 0)
      << what << ", " << toString(got.scalar_type());
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
  const DecoderOps& exact = composed_ops();
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
  for (const at::ScalarType type : kTypes) {
    for (const auto& [dim, aligned] : kWidths) {
      for (const bool residual : {false, true}) {
        const std::string what =
            "dim " + std::to_string(dim) + (aligned ? "" : ", not aligned") + (residual ? ", with a residual" : "");
        const int64_t rows = dim > 4000 ? 3 : 7;
        const at::Tensor x = random({rows, dim}, type, aligned), weight = random({dim}, type);
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
          expect_near(got[0], wide(x) + wide(delta), 0, what + ": sum");
        } else {
          EXPECT_TRUE(got[0].is_same(x));
        }
        // The statistics are those of the rounded sum.
        const RmsNorm want = exact.add_rms_norm(wide(got[0]), {}, wide(weight), 1e-5);
        expect_near(got[1], want.y, 4e-7, what + ": y");
        expect_near(got[2].view({rows, 1}), want.inv_rms, 2e-7, what + ": statistics");
      }
    }
  }
}

TEST_F(GpuOps, RmsNormGradient) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& [dim, aligned] : kWidths) {
      for (const bool residual : {false, true}) {
        const std::string what = "dim " + std::to_string(dim) + (aligned ? "" : ", not aligned") +
                                 (residual ? ", with a gradient of the sum" : "");
        const int64_t rows = dim > 4000 ? 3 : 7;
        const at::Tensor sum = random({rows, dim}, type, aligned), weight = random({dim}, type);
        const at::Tensor dy = random({rows, dim}, type);
        const at::Tensor dsum = residual ? random({rows, dim}, type) : at::Tensor();
        const at::Tensor inv_rms = exact.add_rms_norm(wide(sum), {}, wide(weight), 1e-5).inv_rms;
        const Tensors got = twice([&]() -> Tensors {
          const RmsNormGradient r =
              kernels.add_rms_norm_backward(dy, dsum, sum, weight, inv_rms.to(place.device(), at::kFloat).view({rows}));
          return {r.dx, r.dweight};
        });
        if (!started.empty()) {
          EXPECT_EQ(started[0].vectors, aligned && dim * sum.element_size() % 16 == 0) << what;
        }
        const RmsNormGradient want =
            exact.add_rms_norm_backward(wide(dy), wide(dsum), wide(sum), wide(weight), inv_rms);
        const double terms = (wide(dy) * wide(weight) * inv_rms).abs().max().item<double>();
        expect_near(got[0], want.dx, 1e-6, what + ": dx", terms);
        expect_near(got[1], want.dweight, 1e-6, what + ": dweight");
      }
    }
  }
}

// A group computes several rows if there are more than groups, and each group has a row of the sums.
TEST_F(GpuOps, RmsNormGradientOfManyRows) {
  for (const auto& [rows, dim] :
       {std::pair<int64_t, int64_t>{9000, 8}, {1100, 520}, {400, 2048}, {300, 4104}, {700, 1030}}) {
    const at::Tensor sum = random({rows, dim}, at::kFloat), weight = random({dim}, at::kFloat);
    const at::Tensor dy = random({rows, dim}, at::kFloat);
    const at::Tensor inv_rms = exact.add_rms_norm(wide(sum), {}, wide(weight), 1e-5).inv_rms;
    const Tensors got = twice([&]() -> Tensors {
      const RmsNormGradient r =
          kernels.add_rms_norm_backward(dy, {}, sum, weight, inv_rms.to(place.device(), at::kFloat).view({rows}));
      return {r.dx, r.dweight};
    });
    const RmsNormGradient want = exact.add_rms_norm_backward(wide(dy), {}, wide(sum), wide(weight), inv_rms);
    expect_near(got[0], want.dx, 1e-6, "dx");
    expect_near(got[1], want.dweight, 1e-6, "dweight");
    if (started.empty()) continue;
    EXPECT_EQ(started[0].groups, 2112 / started[0].warps);
    EXPECT_EQ(kernel_norm_sums(rows, dim, at::kFloat), started[0].groups * dim * 4);
  }
}

// In fp32 the loops for CPUs and the kernels differ only in the order of sums.
TEST_F(GpuOps, Fp32EqualsTheLoopsForCpus) {
  const auto cpu = [](const at::Tensor& t) { return t.to(at::kCPU); };
  const at::Tensor x = random({9, 200}, at::kFloat), delta = random({9, 200}, at::kFloat);
  const at::Tensor weight = random({200}, at::kFloat), dy = random({9, 200}, at::kFloat);
  const RmsNorm got = kernels.add_rms_norm(x, delta, weight, 1e-5);
  const RmsNorm want = loop_ops().add_rms_norm(cpu(x), cpu(delta), cpu(weight), 1e-5);
  EXPECT_TRUE(cpu(got.sum).equal(want.sum));
  expect_near(got.y, wide(want.y), 4e-7, "y");
  const RmsNormGradient g = kernels.add_rms_norm_backward(dy, delta, got.sum, weight, got.inv_rms);
  const RmsNormGradient w = loop_ops().add_rms_norm_backward(cpu(dy), cpu(delta), want.sum, cpu(weight), want.inv_rms);
  expect_near(g.dx, wide(w.dx), 1e-6, "dx");
  expect_near(g.dweight, wide(w.dweight), 1e-6, "dweight");

  const RotaryTable table = make_rotary_table(at::arange(9, at::kLong), {.head_dim = 40}, at::kFloat, at::kCPU);
  const Heads h = kernels.rotary_split(x, table.cosine.to(place.device()), table.sine.to(place.device()), 1, 2);
  const Heads l = loop_ops().rotary_split(cpu(x), table.cosine, table.sine, 1, 2);
  expect_near(h.q, wide(l.q), 2e-7, "q");
  expect_near(h.k, wide(l.k), 2e-7, "k");
  EXPECT_TRUE(cpu(h.v).equal(l.v));

  const at::Tensor gate_up = random({5, 66}, at::kFloat), dout = random({5, 33}, at::kFloat);
  expect_near(kernels.swiglu(gate_up), wide(loop_ops().swiglu(cpu(gate_up))), 1e-6, "swiglu");
  expect_near(kernels.swiglu_backward(dout, gate_up), wide(loop_ops().swiglu_backward(cpu(dout), cpu(gate_up))), 1e-6,
              "gradient of swiglu");

  const at::Tensor logits = random({4, 300}, at::kFloat), targets = at::randint(-1, 300, {4}, at::kLong);
  const CrossEntropy d = loop_ops().cross_entropy(cpu(logits).clone(), targets, 0.3, at::kFloat);
  const CrossEntropy c = kernels.cross_entropy(logits.clone(), targets.to(place.device()), 0.3, at::kFloat);
  expect_near(c.dlogits, wide(d.dlogits), 1e-6, "dlogits");
  expect_near(c.loss, wide(d.loss), 1e-6, "loss");
}

TEST_F(GpuOps, HeadNorm) {
  const int64_t rows = 6, heads = 3, kv = 2;
  for (const at::ScalarType type : kTypes) {
    for (const int64_t d : {6, 64, 128}) {
      const std::string what = "head size " + std::to_string(d);
      const at::Tensor qkv = random({rows, (heads + 2 * kv) * d}, type), q = random({d}, type), k = random({d}, type);
      const at::Tensor dy = random(qkv.sizes(), type);
      const Tensors got = twice([&]() -> Tensors {
        const HeadNormed r = kernels.head_norm(qkv, q, k, heads, kv, 1e-6);
        const HeadNormGradient g = kernels.head_norm_backward(dy, qkv, q, k, r.inv_rms, heads);
        return {r.y, r.inv_rms, g.dqkv, g.dq_weight, g.dk_weight};
      });
      const HeadNormed r = exact.head_norm(wide(qkv), wide(q), wide(k), heads, kv, 1e-6);
      const HeadNormGradient g = exact.head_norm_backward(wide(dy), wide(qkv), wide(q), wide(k), r.inv_rms, heads);
      const Tensors want{r.y, r.inv_rms, g.dqkv, g.dq_weight, g.dk_weight};
      for (size_t i = 0; i < want.size(); ++i) expect_near(got[i], want[i], 1e-6, what + ", " + std::to_string(i));
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
      const at::Tensor c = wide(table.cosine), s = wide(table.sine);
      const Heads want = exact.rotary_split(wide(qkv), c, s, heads, kv);
      expect_near(got[0], want.q, 2e-7, what + ": q");
      expect_near(got[1], want.k, 2e-7, what + ": k");
      EXPECT_TRUE(wide(got[2]).equal(want.v)) << what;
      const Heads wide_gradients{wide(dheads.q), wide(dheads.k), wide(dheads.v)};
      expect_near(got[3], exact.rotary_split_backward(wide_gradients, c, s), 2e-7, what + ": gradient");
    }
  }
}

TEST_F(GpuOps, SwiGlu) {
  for (const at::ScalarType type : kTypes) {
    for (const auto& [ffn, aligned] : {Width{1}, {16}, {16, false}, {45}, {2048}, {2048, false}, {3000}, {8192}}) {
      const std::string what = "width " + std::to_string(ffn) + (aligned ? "" : ", not aligned");
      const at::Tensor gate_up = random({3, 2 * ffn}, type, aligned).mul_(6), dout = random({3, ffn}, type);
      const Tensors got = twice([&]() -> Tensors {
        return {kernels.swiglu(gate_up), kernels.swiglu_backward(dout, gate_up)};
      });
      const bool vectors = aligned && ffn * dout.element_size() % 16 == 0;
      for (const FiberLauncher::Started& s : started) EXPECT_EQ(s.vectors, vectors) << what;
      expect_near(got[0], exact.swiglu(wide(gate_up)), 1e-6, what);
      expect_near(got[1], exact.swiglu_backward(wide(dout), wide(gate_up)), 1e-6, what + ": gradient");
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
      // A copy that is aligned in the same way.
      const auto copy = [&] { return random({rows, vocab}, at::kFloat, aligned).copy_(logits); };
      const Tensors got = twice([&]() -> Tensors {
        at::Tensor handed_over = copy();
        const void* const memory = handed_over.const_data_ptr();
        const CrossEntropy r = kernels.cross_entropy(std::move(handed_over), on_device, 0.25, type);
        EXPECT_EQ(r.dlogits.const_data_ptr(), memory);
        EXPECT_EQ(r.dlogits.scalar_type(), type);
        return {r.loss, r.dlogits.clone()};
      });
      for (const FiberLauncher::Started& s : started) {
        EXPECT_EQ(s.vectors, aligned && vocab % 4 == 0) << what;
        EXPECT_EQ(s.warps, vocab < 4096 ? 8 : 32) << what;
      }
      const CrossEntropy want = exact.cross_entropy(wide(logits), targets, 0.25, at::kDouble);
      expect_near(got[0], want.loss, 1e-6, what + ": loss");
      expect_near(got[1], want.dlogits, 1e-6, what + ": gradient");
      EXPECT_EQ(got[1][1].abs().max().item<double>(), 0) << "the row does not count";
      const at::Tensor untouched = copy();
      const CrossEntropy without = kernels.cross_entropy(untouched, on_device, 0.25, std::nullopt);
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
    return kernels.cross_entropy(logits.to(place.device()).clone(), target, 1, at::kFloat).loss.item<double>();
  };
  EXPECT_NEAR(loss(at::full({1, 5000}, 3e4F)), std::log(5000.0), 1e-5);
  EXPECT_NEAR(loss(at::full({1, 5000}, -3e4F)), std::log(5000.0), 1e-5);
  const at::Tensor masked = at::full({1, 5000}, -kInfinity);  // whole threads have no finite logit
  masked.narrow(1, 0, 4).zero_();
  EXPECT_NEAR(loss(masked), std::log(4.0), 1e-6);
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
  EXPECT_EQ(kernels.swiglu(none).numel(), 0);
  const at::Tensor targets = at::empty({0}, at::kLong).to(place.device());
  EXPECT_EQ(kernels.cross_entropy(none, targets, 1, at::kFloat).loss.item<double>(), 0);
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
