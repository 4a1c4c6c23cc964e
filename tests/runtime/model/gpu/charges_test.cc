// The memory that the model's operations declare for GPUs (runtime/model/fused_ops.h) against what their kernels take,
// which run on a CPU here (fiber_launcher.h). Products of matrices take memory on a CPU alone, so the loss is compared
// in fp32, where they take none.
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

#include "memory/charge.h"
#include "memory/peak_bytes.h"
#include "runtime/model/choose_ops.h"
#include "runtime/model/fused_ops.h"
#include "tests/runtime/model/gpu/fiber_launcher.h"

namespace annulus::charges_test {
namespace {

constexpr int64_t kRows = 96;

class GpuCharges : public ::testing::TestWithParam<at::ScalarType> {
 protected:
  // The most bytes that are allocated while f runs, more than before.
  static int64_t taken_by(const std::function<void()>& f) {
    const auto bytes = std::make_shared<PeakBytes>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, bytes);
    f();
    return bytes->peak();
  }
  static int64_t charged(const Part& part, When when) {
    int64_t bytes = 0;
    for (const Charge& charge : part.charges) bytes += charge.when == when ? charge.bytes : 0;
    return bytes;
  }
  static at::Tensor random(at::IntArrayRef sizes) { return at::randn(sizes, at::kFloat).to(GetParam()); }
  static int64_t bytes(std::initializer_list<at::Tensor> tensors) {
    int64_t sum = 0;
    for (const at::Tensor& t : tensors) sum += static_cast<int64_t>(t.nbytes());
    return sum;
  }
  static void expect_near(int64_t taken, int64_t charged) {
    EXPECT_NEAR(static_cast<double>(taken), static_cast<double>(charged), 0.01 * static_cast<double>(charged));
  }

  const testing::OnFibers fibers_;
  const Computes gpu_{.dtype = GetParam(), .gpu = true};
  const DecoderOps& ops_ = kernel_ops();
};

TEST_P(GpuCharges, OfANorm) {
  const at::Tensor x = random({kRows, 1024}), delta = random({kRows, 1024}), weight = random({1024});
  const Part part = norm_charges(kRows, 1024, /*with_sum=*/true, gpu_);
  RmsNorm r;
  expect_near(taken_by([&] { r = ops_.add_rms_norm(x, delta, weight, 1e-5); }) + bytes({delta}),
              charged(part, When::kKept) + charged(part, When::kForward));
  EXPECT_EQ(bytes({r.sum, r.inv_rms}), charged(part, When::kKept));
  const at::Tensor dy = random({kRows, 1024}), dsum = random({kRows, 1024});
  expect_near(taken_by([&] { ops_.add_rms_norm_backward(dy, dsum, r.sum, weight, r.inv_rms); }) + bytes({dy, dsum}),
              charged(part, When::kBackward));
}

TEST_P(GpuCharges, OfANormOfHeads) {
  const at::Tensor qkv = random({kRows, 12 * 64}), q = random({64}), k = random({64}), dy = random({kRows, 12 * 64});
  const Part part = head_norm_charges(kRows, 8, 2, 64, gpu_);
  HeadNormed r;
  expect_near(taken_by([&] { r = ops_.head_norm(qkv, q, k, 8, 2, 1e-6); }) + bytes({qkv}),
              charged(part, When::kKept) + charged(part, When::kForward));
  EXPECT_EQ(bytes({qkv, r.inv_rms}), charged(part, When::kKept));
  expect_near(taken_by([&] { ops_.head_norm_backward(dy, qkv, q, k, r.inv_rms, 8); }) + bytes({dy}),
              charged(part, When::kBackward));
}

TEST_P(GpuCharges, OfARotation) {
  const at::Tensor qkv = random({kRows, 12 * 64}), cosine = at::ones({kRows, 32}), sine = at::ones({kRows, 32});
  const Part part = rotary_charges(kRows, 8, 2, 64, gpu_);
  Heads h;
  expect_near(taken_by([&] { h = ops_.rotary_split(qkv, cosine, sine, 8, 2); }) + bytes({qkv}),
              charged(part, When::kForward));
  expect_near(taken_by([&] { ops_.rotary_split_backward(h, cosine, sine); }) + bytes({h.q, h.k, h.v}),
              charged(part, When::kBackward));
}

TEST_P(GpuCharges, OfGatedProducts) {
  const at::Tensor gate_up = random({kRows, 2 * 512}), dout = random({kRows, 512});
  const Part part = glu_charges(kRows, 512, gpu_);
  for (const Activation of : {Activation::kSilu, Activation::kGeluTanh}) {
    expect_near(taken_by([&] { ops_.glu(gate_up, of); }) + bytes({gate_up}),
                charged(part, When::kKept) + charged(part, When::kForward));
    expect_near(taken_by([&] { ops_.glu_backward(dout, gate_up, of); }) + bytes({dout}),
                charged(part, When::kBackward));
  }
}

TEST_P(GpuCharges, OfTheLoss) {
  constexpr int64_t kVocab = 4096, kDim = 32;
  const at::Tensor targets = at::randint(-1, kVocab, {kRows}, at::kLong);
  if (GetParam() == at::kFloat) {
    const at::Tensor hidden = random({kRows, kDim}).requires_grad_(), head = random({kVocab, kDim}).requires_grad_();
    const Part part = loss_charges(kRows, kDim, kVocab, gpu_);
    expect_near(taken_by([&] { linear_cross_entropy_sum(hidden, head, targets, 1); }) + bytes({hidden}),
                charged(part, When::kKept) + charged(part, When::kForward));
  }
  // Whatever the dtype of the gradient, it takes no memory but that of the logits and a loss for each row, which
  // LibTorch's sum on a CPU copies.
  const at::Tensor logits = at::randn({kRows, kVocab}, at::kFloat);
  EXPECT_LE(taken_by([&] { ops_.cross_entropy(logits, targets, {}, 1, GetParam()); }), kRows * (4 + 8) + 64);
}

INSTANTIATE_TEST_SUITE_P(Types, GpuCharges, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace annulus::charges_test
