// See recompute.h.
#include "runtime/model/recompute.h"

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Held : torch::CustomClassHolder {
  explicit Held(TensorFunction function) : f(std::move(function)) {}
  const TensorFunction f;
};

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList inputs, const c10::intrusive_ptr<Held>& held) {
    context->save_for_backward(inputs.vec());
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return held->f(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto held = c10::static_intrusive_pointer_cast<Held>(context->saved_data["held"].toCapsule());
    variable_list inputs = context->get_saved_variables();
    for (at::Tensor& t : inputs) t = t.detach().requires_grad_();
    variable_list outputs;
    {
      const at::AutoGradMode with_gradients(true);
      outputs = held->f(inputs);
    }
    variable_list result = torch::autograd::grad(outputs, inputs, grads);
    result.emplace_back();  // `held` has no gradient
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(const TensorFunction& f, const std::vector<at::Tensor>& inputs) {
  // Nodes of autograd take only defined tensors.
  std::vector<at::Tensor> given;
  std::vector<size_t> places;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    given.push_back(inputs[i]);
    places.push_back(i);
  }
  const TensorFunction of_given = [f, places, count = inputs.size()](const std::vector<at::Tensor>& given) {
    std::vector<at::Tensor> all(count);
    for (size_t i = 0; i < places.size(); ++i) all[places[i]] = given[i];
    return f(all);
  };
  return Recomputed::apply(at::TensorList(given), c10::make_intrusive<Held>(of_given));
}

}  // namespace annulus
