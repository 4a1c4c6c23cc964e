// Tests of the matrix products of the decoder (runtime/model/products.h): values and gradients against fp64, and which
// library computes them.
#include "runtime/model/products.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/common/exactness.h"

namespace annulus::products_test {
namespace {

// Whether `got` is a b, plus `added` if it is defined, as exact as LibTorch's plain product in fp32 (fp64 for fp64).
::testing::AssertionResult is_product(const at::Tensor& got, const at::Tensor& a, const at::Tensor& b,
                                      const at::Tensor& added = {}) {
  const auto computed = [&](at::ScalarType type, bool magnitudes) {
    const auto in_type = [&](const at::Tensor& t) {
      return magnitudes ? t.detach().to(type).abs() : t.detach().to(type);
    };
    const at::Tensor product = in_type(a).matmul(in_type(b));
    return added.defined() ? product + in_type(added) : product;
  };
  const at::Tensor exact = computed(at::kDouble, false);
  const double terms = testing::largest(computed(at::kDouble, true));
  if (got.scalar_type() == at::kDouble) return testing::agrees(got, exact, terms);
  return testing::as_exact_as(got, computed(at::kFloat, false), exact, terms);
}

// The names of the operators that LibTorch runs on this thread while `f` runs.
thread_local std::vector<std::string> operators;
template <typename F>
int64_t calls_of(const std::string& name, const F& f) {
  operators.clear();
  const auto begin = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
    operators.emplace_back(function.name());
    return nullptr;
  };
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::FUNCTION}));
  f();
  at::removeCallback(handle);
  return std::count(operators.begin(), operators.end(), name);
}
constexpr const char* kOneDnn = "mkldnn::_linear_pointwise";

struct Layer {
  at::Tensor x, weight, bias;
  std::vector<at::Tensor> inputs() const {
    return bias.defined() ? std::vector<at::Tensor>{x, weight, bias} : std::vector<at::Tensor>{x, weight};
  }
};

Layer drawn(int64_t rows, int64_t in, int64_t out, bool bias) {
  return {at::randn({rows, in}), at::randn({out, in}), bias ? at::randn({out}) : at::Tensor()};
}

TEST(Products, LinearAndItsGradientsAgreeWithFp64) {
  for (const int64_t rows : {1, 63, 64, 65, 300}) {
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 1}, {7, 33}, {64, 48}, {129, 1}, {256, 768}}) {
      for (const bool bias : {false, true}) {
        const Layer layer = drawn(rows, in, out, bias);
        for (at::Tensor t : layer.inputs()) t.requires_grad_();
        const at::Tensor dy = at::randn({rows, out});
        const at::Tensor y = linear_layer(layer.x, layer.weight, layer.bias);
        y.backward(dy);
        const std::string what = std::to_string(rows) + " " + std::to_string(in) + " " + std::to_string(out);
        EXPECT_TRUE(is_product(y, layer.x, layer.weight.t(), layer.bias)) << what;
        EXPECT_TRUE(is_product(layer.x.grad(), dy, layer.weight)) << what;
        EXPECT_TRUE(is_product(layer.weight.grad(), dy.t(), layer.x)) << what;
        if (bias) {
          EXPECT_TRUE(is_product(layer.bias.grad().unsqueeze(0), at::ones({1, rows}), dy)) << what;
        }
      }
    }
  }
}

// Frozen weights, and the first layer of a model, whose input needs no gradient.
TEST(Products, OnlyGradientsThatAreNeededAreComputed) {
  for (int which = 0; which < 3; ++which) {
    const Layer layer = drawn(100, 16, 24, /*bias=*/true);
    layer.inputs()[which].requires_grad_();
    const at::Tensor y = linear_layer(layer.x, layer.weight, layer.bias);
    const at::Tensor dy = at::randn({100, 24});
    const int64_t products =
        calls_of("aten::mm", [&] { y.backward(dy); }) + std::count(operators.begin(), operators.end(), kOneDnn);
    EXPECT_EQ(products, which == 2 ? 0 : 1) << which;
    for (int i = 0; i < 3; ++i) EXPECT_EQ(layer.inputs()[i].grad().defined(), i == which) << which;
  }
}

TEST(Products, FactorsMayBeStrided) {
  const at::Tensor wide = at::randn({200, 100}), weight = at::randn({50, 80});
  for (const at::Tensor& a :
       {wide.narrow(1, 10, 50), at::randn({50, 200}).t(), wide.narrow(0, 7, 90).narrow(1, 0, 50)}) {
    for (const at::Tensor& b : {weight, at::randn({80, 50}).t(), at::randn({100, 80}).narrow(0, 3, 50)}) {
      EXPECT_TRUE(is_product(product(a, b), a, b));
      const at::Tensor around = at::full({a.size(0) + 2, 80}, 7.0f);
      product_into(around.narrow(0, 1, a.size(0)), a, b);
      EXPECT_TRUE(is_product(around.narrow(0, 1, a.size(0)), a, b));
      EXPECT_TRUE(around[0].eq(7).all().item<bool>() && around[-1].eq(7).all().item<bool>());
    }
  }
}

TEST(Products, LargeOnesInFp32AreComputedByOneDnn) {
  if (!at::hasMKLDNN()) GTEST_SKIP() << "this LibTorch has no oneDNN";
  const at::Tensor x = at::randn({64, 32}), weight = at::randn({16, 32});
  const auto calls = [&](const at::Tensor& a, const at::Tensor& b) {
    return calls_of(kOneDnn, [&] { product(a, b.t()); });
  };
  EXPECT_EQ(calls(x, weight), 1);
  EXPECT_EQ(calls(x.narrow(0, 0, 63), weight), 0);
  EXPECT_EQ(calls(x.to(at::kDouble), weight.to(at::kDouble)), 0);
  EXPECT_EQ(calls(x.to(at::kBFloat16), weight.to(at::kBFloat16)), 0);
  at::globalContext().setUserEnabledMkldnn(false);
  EXPECT_EQ(calls(x, weight), 0);
  at::globalContext().setUserEnabledMkldnn(true);

  // Also the gradient of the input.
  x.requires_grad_();
  EXPECT_EQ(calls_of(kOneDnn, [&] { linear_layer(x, weight, at::Tensor()).sum().backward(); }), 2);
}

TEST(Products, WideProductOfHalvesIsFp32) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    const at::Tensor a = at::randn({70, 40}).to(dtype), b = at::randn({40, 30}).to(dtype);
    const at::Tensor got = wide_product(a, b);
    EXPECT_EQ(got.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
    EXPECT_TRUE(is_product(got, a, b)) << dtype;
  }
}

TEST(Products, EmptyMatricesAreAllowed) {
  const at::Tensor none = product(at::randn({100, 0}), at::randn({0, 5}));
  EXPECT_TRUE(none.equal(at::zeros({100, 5})));
  EXPECT_EQ(product(at::randn({0, 4}), at::randn({4, 5})).sizes(), at::IntArrayRef({0, 5}));
  EXPECT_EQ(product(at::randn({100, 4}), at::randn({4, 0})).sizes(), at::IntArrayRef({100, 0}));
}

}  // namespace
}  // namespace annulus::products_test
