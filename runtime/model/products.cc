// See products.h.
#include "runtime/model/products.h"

#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string_view>

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Smaller products, as of generation, take less time in MKL.
constexpr int64_t kLeastRows = 64;

// a b^T in oneDNN, with b of any strides: the operator into which torch.compile turns linear layers on CPUs. LibTorch
// has no other that takes fp32 as it lies in memory.
using OneDnnLinear = at::Tensor(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                                std::string_view function, c10::List<std::optional<at::Scalar>> arguments,
                                std::optional<std::string_view> algorithm);

const std::optional<c10::TypedOperatorHandle<OneDnnLinear>>& one_dnn_linear() {
  static const auto found = []() -> std::optional<c10::TypedOperatorHandle<OneDnnLinear>> {
    const auto schema = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!at::hasMKLDNN() || !schema) return std::nullopt;
    return schema->typed<OneDnnLinear>();
  }();
  return found;
}

at::Tensor one_dnn_product(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  return one_dnn_linear()->call(a, b.t(), bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

bool by_one_dnn(const at::Tensor& a, const at::Tensor& b) {
  return a.is_cpu() && a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat && a.is_contiguous() &&
         a.size(0) >= kLeastRows && a.size(1) > 0 && b.size(1) > 0 && at::globalContext().userEnabledMkldnn() &&
         one_dnn_linear();
}

class Linear : public Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["bias"] = bias.has_value();
    return one_dnn_product(x, weight.t(), bias);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& x = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dy = grads[0].contiguous();
    // MKL is the faster one where the first factor is a transposed matrix, which oneDNN copies.
    return {ctx->needs_input_grad(0) ? product(dy, weight) : at::Tensor(),
            ctx->needs_input_grad(1) ? at::mm(dy.t(), x) : at::Tensor(),
            ctx->saved_data["bias"].toBool() && ctx->needs_input_grad(2) ? dy.sum(0) : at::Tensor()};
  }
};

}  // namespace

at::Tensor linear_layer(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const std::optional<at::Tensor> added = bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt;
  return by_one_dnn(x, weight) ? Linear::apply(x, weight, added) : at::linear(x, weight, added);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return by_one_dnn(a, b) ? one_dnn_product(a, b, std::nullopt) : at::mm(a, b);
}

void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  if (by_one_dnn(a, b)) {
    out.copy_(product(a, b));
  } else {
    at::Tensor result = out;
    at::mm_out(result, a, b);
  }
}

at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType wide = at::toOpMathType(a.scalar_type());
  if (wide == a.scalar_type()) return product(a, b);
  // The product with a wider result exists only for GPUs.
  return a.is_cuda() ? at::mm(a, b, wide) : at::mm(a.to(wide), b.to(wide));
}

void add_wide_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cuda()) {
    // As `sum` is also what is added to, LibTorch copies nothing and has cuBLAS add to it with a factor of 1.
    at::addmm_out(sum, sum, a, b, sum.scalar_type());
  } else {
    sum.add_(wide_product(a, b));
  }
}

}  // namespace annulus
