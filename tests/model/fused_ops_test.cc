// Compares the fused operations, values and gradients, in fp64, fp32 and bf16, with a naive fp64 implementation and
// LibTorch's gradients of it.
#include "model/fused_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
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

// Runs an operation on inputs in a dtype; holds its outputs and the gradients of sum(output_i * probe_i).
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

// Compares fp64 with `naive` and LibTorch's gradients of it, and the loops for fp32 and bf16 with fp64. Values of bf16
// have 8 bits. Inputs are rounded to bf16 first, so that the difference is that of the operation.
void check(const Op& op, const Op& naive, const Tensors& inputs, const Tensors& probes) {
  Tensors rounded;
  for (const at::Tensor& t : inputs) rounded.push_back(t.to(at::kBFloat16).to(at::kDouble));
  const Run exact = run(naive, rounded, at::kDouble, probes);
  const auto compare = [&](at::ScalarType type, double of_outputs, double of_gradients) {
    const Run got = run(op, rounded, type, probes);
    for (size_t i = 0; i < exact.outputs.size(); ++i) {
      expect_near(got.outputs[i].detach(), exact.outputs[i].detach(), of_outputs,
                  std::string(toString(type)) + " output " + std::to_string(i));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(got.gradients[i].scalar_type(), type);
      expect_near(got.gradients[i], exact.gradients[i], of_gradients,
                  std::string(toString(type)) + " gradient " + std::to_string(i));
    }
  };
  // The largest errors of eight seeds with AVX-512, AVX2 and neither were 5.6e-16 and 9.3e-16, in fp32 1.7e-7 and
  // 4.3e-7. Another order of summation may double them.
  compare(at::kDouble, 2e-15, 3e-15);
  compare(at::kFloat, 6e-7, 1.5e-6);
  // One rounding is 2^-9 of a value. The probes are rounded as well, and a gradient passes through two operations.
  compare(at::kBFloat16, 1e-2, 2e-2);
}

TEST(FusedOps, RmsNormWithResidual) {
  for (const int64_t dim : {4, 33, 256}) {
    const Tensors in{at::randn({37, dim}), at::randn({37, dim}), at::randn({dim})};
    const Tensors probes{at::randn({37, dim}), at::randn({37, dim})};
    const Op op = [](const Tensors& t) {
      const Normed n = add_rms_norm(t[0], t[1], t[2], 1e-5);
      return Tensors{n.sum, n.y};
    };
    const Op naive = [](const Tensors& t) {
      const at::Tensor sum = t[0] + t[1];
      return Tensors{sum, sum * at::rsqrt(sum.square().mean(-1, /*keepdim=*/true) + 1e-5) * t[2]};
    };
    check(op, naive, in, probes);
    check(op, naive, in, {at::Tensor(), probes[1]});  // the sum is used nowhere else
  }
}

TEST(FusedOps, RmsNormWithoutResidual) {
  check(
      [](const Tensors& t) {
        const Normed n = add_rms_norm(t[0], at::Tensor(), t[1], 1e-5);
        return Tensors{n.sum, n.y};
      },
      [](const Tensors& t) {
        return Tensors{t[0] * 1, t[0] * at::rsqrt(t[0].square().mean(-1, /*keepdim=*/true) + 1e-5) * t[1]};
      },
      {at::randn({5, 48}), at::randn({48})}, {at::randn({5, 48}), at::randn({5, 48})});
}

TEST(FusedOps, HeadNorm) {
  for (const int64_t d : {6, 32}) {
    const int64_t rows = 19, heads = 4, kv = 2;
    check([&](const Tensors& t) { return Tensors{head_norm(t[0], t[1], t[2], heads, kv, 1e-6)}; },
          [&](const Tensors& t) {
            const at::Tensor all = t[0].view({rows, heads + 2 * kv, d});
            const auto normed = [](const at::Tensor& x, const at::Tensor& weight) {
              return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-6) * weight;
            };
            return Tensors{at::cat({normed(all.narrow(1, 0, heads), t[1]), normed(all.narrow(1, heads, kv), t[2]),
                                    all.narrow(1, heads + kv, kv)},
                                   1)
                               .view({rows, -1})};
          },
          {at::randn({rows, (heads + 2 * kv) * d}), at::randn({d}), at::randn({d})},
          {at::randn({rows, (heads + 2 * kv) * d})});
  }
}

TEST(FusedOps, RotarySplit) {
  const int64_t n = 7;
  const int64_t heads = 4;
  const int64_t kv = 2;
  const int64_t d = 6;
  const at::Tensor positions = at::arange(n, at::kLong).mul(37).add(3);
  const auto table_for = [&](const at::Tensor& t) {
    return make_rotary_table(positions, {.head_dim = d}, at::toOpMathType(t.scalar_type()), at::kCPU);
  };
  check(
      [&](const Tensors& t) {
        const Heads h = rotary_split(t[0], table_for(t[0]), heads, kv);
        return Tensors{h.q, h.k, h.v};
      },
      [&](const Tensors& t) {
        const RotaryTable table = table_for(t[0]);
        const at::Tensor all = t[0].view({t[0].size(0) / n, n, heads + 2 * kv, d});
        return Tensors{rotate(all.narrow(2, 0, heads), table), rotate(all.narrow(2, heads, kv), table),
                       all.narrow(2, heads + kv, kv)};
      },
      {at::randn({3 * n, (heads + 2 * kv) * d})},
      {at::randn({3, n, heads, d}), at::randn({3, n, kv, d}), at::randn({3, n, kv, d})});
}

TEST(FusedOps, RotaryScoresDependOnDistanceAlone) {
  const at::Tensor qkv = at::randn({1, 3 * 8}).expand({4, 24}).contiguous();
  const RotaryTable table =
      make_rotary_table(at::arange(4, at::kLong).mul(5).add(100), {.head_dim = 8}, at::kFloat, at::kCPU);
  const Heads h = rotary_split(qkv, table, 1, 1);
  const auto score = [&](int64_t i, int64_t j) { return h.q.select(1, i).mul(h.k.select(1, j)).sum().item<double>(); };
  EXPECT_NEAR(score(1, 0), score(3, 2), 2e-6);  // at most 4.8e-7 in eight draws
  EXPECT_NEAR(score(2, 0), score(3, 1), 2e-6);
}

TEST(FusedOps, SwiGlu) {
  for (const int64_t ffn : {1, 16, 45}) {
    check([](const Tensors& t) { return Tensors{swiglu(t[0])}; },
          [&](const Tensors& t) {
            const at::Tensor gate = t[0].narrow(1, 0, ffn);
            return Tensors{gate * at::sigmoid(gate) * t[0].narrow(1, ffn, ffn)};
          },
          {at::randn({9, 2 * ffn}).mul(6)}, {at::randn({9, ffn})});
  }
}

TEST(FusedOps, SwiGluOfHugeGates) {
  const at::Tensor in = at::full({1, 4}, 2.0F);
  in.select(1, 0).fill_(-1000);
  in.select(1, 1).fill_(1000);
  const at::Tensor out = swiglu(in);
  // 2000 times the smallest normal number, 2.4e-35, counts as 0; the result was 1.2e-35.
  EXPECT_NEAR(out[0][0].item<double>(), 0, 5e-35);
  EXPECT_NEAR(out[0][1].item<double>(), 2000, 2.5e-4);  // two units in the last place; it was equal
}

TEST(FusedOps, LinearCrossEntropy) {
  const int64_t rows = 50, vocab = 19;
  const at::Tensor targets = at::randint(0, vocab, {rows}, at::kLong);
  targets.narrow(0, 15, 20).fill_(-1);  // these do not count: a whole chunk of 16 and parts of both adjacent ones
  for (const double scale : {1.0, 0.02}) {
    // Chunk sizes: 0 is the default, 50 is all rows at once, and 16 does not divide the number of rows.
    for (const int64_t chunk : {0, 50, 16, 1}) {
      for (const double gradient : {1.0, -2.5}) {
        check([&](const Tensors& t) { return Tensors{linear_cross_entropy_sum(t[0], t[1], targets, scale, chunk)}; },
              [&](const Tensors& t) {
                return Tensors{at::nll_loss(at::log_softmax(at::mm(t[0], t[1].t()), -1), targets, {},
                                            at::Reduction::Sum, /*ignore_index=*/-1) *
                               scale};
              },
              {at::randn({rows, 8}), at::randn({vocab, 8}).mul(2)}, {at::full({}, gradient)});
      }
    }
  }
}

TEST(FusedOps, LossOfABf16ModelIsFp32) {
  const at::Tensor targets = at::zeros({3}, at::kLong);
  const at::TensorOptions bf16(at::kBFloat16);
  EXPECT_EQ(linear_cross_entropy_sum(at::randn({3, 8}, bf16), at::randn({5, 8}, bf16), targets, 1).scalar_type(),
            at::kFloat);
}

TEST(FusedOps, LossChunkRowsBoundTheLogits) {
  EXPECT_EQ(loss_chunk_rows(256, at::kFloat), kLossChunkBytes / 1024);
  EXPECT_EQ(loss_chunk_rows(32768, at::kBFloat16), kLossChunkBytes / 4 / 32768);
  EXPECT_EQ(loss_chunk_rows(int64_t{1} << 40, at::kFloat), 1);
}

TEST(FusedOps, LinearCrossEntropyRefusesTargetsOutsideTheVocabulary) {
  const at::Tensor hidden = at::randn({2, 4}), head = at::randn({8, 4});
  EXPECT_THROW(linear_cross_entropy_sum(hidden, head, at::full({2}, 8, at::kLong), 1), Error);
  EXPECT_THROW(linear_cross_entropy_sum(hidden, head, at::full({2}, -2, at::kLong), 1), Error);
}

TEST(FusedOps, NaNStaysNaN) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    at::Tensor x = at::randn({3, 8}, type);
    x[0][0] = std::nan("");
    EXPECT_TRUE(
        std::isnan(linear_cross_entropy_sum(x, at::ones({8, 8}, type), at::zeros({3}, at::kLong), 1).item<double>()));
    EXPECT_TRUE(std::isnan(add_rms_norm(x, {}, at::ones({8}, type), 1e-5).y.sum().item<double>()));
    EXPECT_TRUE(std::isnan(swiglu(x).sum().item<double>()));
  }
}

}  // namespace
}  // namespace annulus
