// Compares the fused operations, values and gradients, in fp64, fp32 and bf16, with a naive fp64 implementation and
// LibTorch's gradients of it.
#include "runtime/model/fused_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "common/error.h"
#include "tests/common/exactness.h"
#include "tests/runtime/model/differentiable_ops.h"

namespace annulus::fused_ops_test {
namespace {

using testing::geglu;
using testing::head_norm;
using testing::rotary_split;
using testing::swiglu;

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

// An element passes through several operations, each of which rounds it. Small tensors may have no element for which
// the plain chain rounds as often in one direction, so that many roundings of the largest one are allowed in any case.
constexpr double kRoundings = 3;

// Compares values and gradients in fp64 with `naive` and LibTorch's gradients of it, and in fp32 and bf16 with the
// errors that `naive` has in these dtypes. Inputs and probes are rounded to bf16 first, so that the error is that of
// the operation.
void check(const Op& op, const Op& naive, const Tensors& inputs, const Tensors& probes) {
  const auto rounded = [](Tensors tensors) {
    for (at::Tensor& t : tensors) t = t.defined() ? t.to(at::kBFloat16).to(at::kDouble) : t;
    return tensors;
  };
  const Tensors in = rounded(inputs), weights = rounded(probes);
  const Run exact = run(naive, in, at::kDouble, weights);
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const auto compare = [&](const at::Tensor& got, const at::Tensor& usual, const at::Tensor& want, const char* what,
                             size_t i) {
      EXPECT_TRUE(type == at::kDouble ? testing::agrees(got, want)
                                      : testing::as_exact_as(got, usual, want, kRoundings * testing::largest(want)))
          << toString(type) << " " << what << " " << i;
    };
    const Run got = run(op, in, type, weights), usual = run(naive, in, type, weights);
    for (size_t i = 0; i < exact.outputs.size(); ++i) {
      // A loss of bf16 is fp32, and its plain chain, too.
      const at::ScalarType of_output = got.outputs[i].scalar_type();
      const Run in_type = of_output == type ? usual : run(naive, in, of_output, weights);
      compare(got.outputs[i], in_type.outputs[i], exact.outputs[i].detach(), "output", i);
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      EXPECT_EQ(got.gradients[i].scalar_type(), type);
      compare(got.gradients[i], usual.gradients[i], exact.gradients[i], "gradient", i);
    }
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
    const Op naive = [](const Tensors& t) {
      const at::Tensor sum = t[0] + t[1];
      return Tensors{sum, sum * at::rsqrt(sum.square().mean(-1, /*keepdim=*/true) + 1e-5) * t[2]};
    };
    check(op, naive, in, probes);
    check(op, naive, in, {at::Tensor(), probes[1]});  // the sum is used nowhere else
  }
}

// Checks the gradients of weights, the inputs but the first, in fp32. `terms` are the numbers of what is added up to
// each. All terms are near 1 but one of 2^24: a running sum that has this term does not change by the others.
void check_sums(const Op& op, const std::vector<int64_t>& terms, Tensors in, at::Tensor probe) {
  in[0].fill_(1);
  probe.fill_(1)[0].fill_(0x1p24);
  const Run got = run(op, in, at::kFloat, {probe}), exact = run(op, in, at::kDouble, {probe});
  for (size_t i = 1; i < in.size(); ++i) {
    // Two levels of sums, of which the longest has at most 2 sqrt(n) additions one after the other. The error of a sum
    // with d of them is at most gamma_d of what is added up, which has one sign here (Higham, Accuracy and Stability of
    // Numerical Algorithms, section 4.2). The terms themselves are results of fewer than ten roundings.
    const double d = 2 * std::sqrt(static_cast<double>(terms[i - 1])) + 10;
    EXPECT_TRUE(testing::within(testing::error_of(got.gradients[i], exact.gradients[i]),
                                d * testing::unit_roundoff(at::kFloat) * testing::largest(exact.gradients[i])))
        << i;
  }
}

// The gradients of weights are sums over all rows. The error of a single running sum would grow with their number, and
// be about fifty times what is allowed for sums of two levels.
TEST(FusedOps, GradientsOfNormsOverManyRowsAreSumsOfTwoLevels) {
  const int64_t rows = 10000, dim = 4, heads = 6, kv = 2, width = (heads + 2 * kv) * dim;
  check_sums([](const Tensors& t) { return Tensors{add_rms_norm(t[0], at::Tensor(), t[1], 1e-5).y}; }, {rows},
             {at::empty({rows, dim}), at::randn({dim})}, at::empty({rows, dim}));
  check_sums([&](const Tensors& t) { return Tensors{head_norm(t[0], t[1], t[2], heads, kv, 1e-5)}; },
             {rows * heads, rows * kv}, {at::empty({rows, width}), at::randn({dim}), at::randn({dim})},
             at::empty({rows, width}));
}

// A tile's part of the gradient of a norm's weight is not rounded to bf16, in which 257 is 256.
TEST(FusedOps, GradientsOfNormsOfBf16AreSumsInFp32) {
  const at::TensorOptions bf16(at::kBFloat16);
  const NormWeight weight(at::ones({4}, bf16));
  const at::Tensor ones = at::ones({257, 4}, bf16), inv_rms = at::ones({257, 1});
  const RmsNormGradient g = ops_for({ones, weight.weight}).add_rms_norm_backward(ones, {}, ones, weight, inv_rms);
  EXPECT_EQ(g.dweight.scalar_type(), at::kFloat);
  EXPECT_TRUE(g.dweight.eq(257).all().item<bool>());
  // Two heads of queries and one of keys, and one of values.
  const at::Tensor heads = at::ones({257, 16}, bf16);
  const HeadNormGradient h =
      ops_for({heads, weight.weight}).head_norm_backward(heads, heads, weight, weight, at::ones({257, 3}), /*heads=*/2);
  EXPECT_TRUE(h.dq_weight.eq(514).all().item<bool>());
  EXPECT_TRUE(h.dk_weight.eq(257).all().item<bool>());
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

// A weight that is centered at zero: 1 is added to it in the accumulator's dtype.
TEST(FusedOps, RmsNormWithAZeroCenteredWeight) {
  for (const int64_t dim : {4, 33, 256}) {
    const Op op = [](const Tensors& t) {
      const Normed n = add_rms_norm(t[0], t[1], NormWeight(t[2], 1), 1e-5);
      return Tensors{n.sum, n.y};
    };
    const Op naive = [](const Tensors& t) {
      const at::Tensor sum = t[0] + t[1];
      return Tensors{sum, sum * at::rsqrt(sum.square().mean(-1, /*keepdim=*/true) + 1e-5) * (t[2] + 1)};
    };
    check(op, naive, {at::randn({37, dim}), at::randn({37, dim}), at::randn({dim}).mul(0.3)},
          {at::randn({37, dim}), at::randn({37, dim})});
  }
  // The sum is not rounded to bf16, in which 1 + 2^-8 is 1. Here 3 is divided by 4, and numbers near 3/4 are 2^-8
  // apart.
  const at::TensorOptions bf16(at::kBFloat16);
  const at::Tensor y = add_rms_norm(at::full({1, 4}, 3, bf16), {}, NormWeight(at::full({4}, 0x1p-8, bf16), 1), 7).y;
  EXPECT_EQ(y[0][0].item<double>(), 0.75 + 0x1p-8);
}

TEST(FusedOps, HeadNorm) {
  for (const double offset : {0.0, 1.0}) {
    for (const int64_t d : {6, 32}) {
      const int64_t rows = 19, heads = 4, kv = 2;
      check([&](const Tensors& t) { return Tensors{head_norm(t[0], t[1], t[2], heads, kv, 1e-6, offset)}; },
            [&](const Tensors& t) {
              const at::Tensor all = t[0].view({rows, heads + 2 * kv, d});
              const auto normed = [&](const at::Tensor& x, const at::Tensor& weight) {
                return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + 1e-6) * (weight + offset);
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
  // A term of a score is rounded 7 times: three times in each factor (its sine or cosine, the product and the sum) and
  // as a product. With the sum of 8 terms this is gamma_15 (exactness.h) for each of the two scores, of at most twice
  // the product of the lengths, as |a| + |b| is at most the square root of 2 (a^2 + b^2).
  const double lengths = h.q.select(1, 0).norm().item<double>() * h.k.select(1, 0).norm().item<double>();
  const double allowed = 2 * 16 * testing::unit_roundoff(at::kFloat) * 2 * lengths;
  EXPECT_NEAR(score(1, 0), score(3, 2), allowed);
  EXPECT_NEAR(score(2, 0), score(3, 1), allowed);
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

TEST(FusedOps, GeGlu) {
  for (const int64_t ffn : {1, 16, 45}) {
    check([](const Tensors& t) { return Tensors{geglu(t[0])}; },
          [&](const Tensors& t) {
            const at::Tensor gate = t[0].narrow(1, 0, ffn);
            const at::Tensor u = (gate + gate * gate * gate * 0.044715) * std::sqrt(2 / std::numbers::pi);
            return Tensors{gate * (at::tanh(u) + 1) * 0.5 * t[0].narrow(1, ffn, ffn)};
          },
          {at::randn({9, 2 * ffn}).mul(3)}, {at::randn({9, ffn})});
  }
  const at::Tensor out = geglu(at::tensor({-1000.0F, 1000.0F, 2.0F, 2.0F}).view({1, 4}));
  EXPECT_NEAR(out[0][0].item<double>(), 0, 2 * 2000 * std::numeric_limits<float>::min());
  EXPECT_NEAR(out[0][1].item<double>(), 2000, 8 * testing::unit_roundoff(at::kFloat) * 2000);
}

TEST(FusedOps, SwiGluOfHugeGates) {
  const at::Tensor in = at::full({1, 4}, 2.0F);
  in.select(1, 0).fill_(-1000);
  in.select(1, 1).fill_(1000);
  const at::Tensor out = swiglu(in);
  // An exponential may end at about the smallest normal number instead of at 0.
  EXPECT_NEAR(out[0][0].item<double>(), 0, 2 * 2000 * std::numeric_limits<float>::min());
  // The exponential may be off by four roundings, and there are an addition, a quotient and two products.
  EXPECT_NEAR(out[0][1].item<double>(), 2000, 8 * testing::unit_roundoff(at::kFloat) * 2000);
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

TEST(FusedOps, LinearCrossEntropyWeighsItsTargets) {
  const int64_t rows = 50, vocab = 19;
  const at::Tensor targets = at::randint(0, vocab, {rows}, at::kLong);
  targets.narrow(0, 15, 7).fill_(-1);
  // Of any sign: advantages of reinforcement learning are below 0 as often as above.
  const at::Tensor weights = at::randn({rows}).mul_(3);
  weights.narrow(0, 30, 4).fill_(0);
  ASSERT_TRUE(weights.lt(0).any().item<bool>() && weights.gt(0).any().item<bool>());
  for (const int64_t chunk : {0, 16, 1}) {
    for (const double gradient : {1.0, -2.5}) {
      check(
          [&](const Tensors& t) {
            return Tensors{linear_cross_entropy_sum(t[0], t[1], targets, 0.02, chunk, weights)};
          },
          [&](const Tensors& t) {
            const at::Tensor nats = at::nll_loss(at::log_softmax(at::mm(t[0], t[1].t()), -1), targets, {},
                                                 at::Reduction::None, /*ignore_index=*/-1);
            return Tensors{nats.mul(weights.to(nats.scalar_type())).sum() * 0.02};
          },
          {at::randn({rows, 8}), at::randn({vocab, 8}).mul(2)}, {at::full({}, gradient)});
    }
  }
  // Weights of 1 change no bit.
  const at::Tensor hidden = at::randn({rows, 8}), head = at::randn({vocab, 8});
  EXPECT_TRUE(linear_cross_entropy_sum(hidden, head, targets, 1)
                  .equal(linear_cross_entropy_sum(hidden, head, targets, 1, 0, at::ones({rows}))));
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
    EXPECT_TRUE(std::isnan(geglu(x).sum().item<double>()));
  }
}

}  // namespace
}  // namespace annulus::fused_ops_test
