// The functions of attention.h, and attention() of planned_call.h: an autograd node around attention_forward and
// attention_backward.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <utility>

#include "attention/execution/planned_call.h"
#include "common/environment.h"

namespace annulus {
namespace {

// What passes from forward to backward as an opaque value of the node: the forward's output without its tensors. Before
// the forward, only the call.
struct HeldOutput : torch::CustomClassHolder {
  explicit HeldOutput(const PlannedCall& call) { output.call = call; }
  AttentionOutput output;
};

class AttentionNode : public torch::autograd::Function<AttentionNode> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& sinks,
                            const c10::intrusive_ptr<HeldOutput>& held) {
    // A kernel may return a view of its own storage. Autograd must not treat it as a view, so that callers may change
    // the result in place.
    const at::AutoDispatchBelowADInplaceOrView below;
    const AttentionOutput result = attention_forward(q, k, v, held->output.call, sinks.value_or(at::Tensor()));
    context->save_for_backward(
        {q, k, v, result.out, result.lse, result.saved_k, result.saved_v, sinks.value_or(at::Tensor())});
    held->output = result.with({}, {}, {}, {}, {});
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    return result.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const auto held = c10::static_intrusive_pointer_cast<HeldOutput>(context->saved_data["held"].toCapsule());
    const AttentionGradients result = attention_backward(
        grads[0], saved[0], saved[1], saved[2], held->output.with(saved[3], saved[4], saved[5], saved[6], saved[7]));
    return {result.dq, result.dk, result.dv, result.dsinks, at::Tensor()};
  }
};

}  // namespace

bool proves_by_default() { return switch_from_environment("ANNULUS_PROVE", true); }

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PlannedCall& call,
                     const at::Tensor& sinks) {
  call.require_kept();
  const at::Tensor out = AttentionNode::apply(q, k, v, sinks.defined() ? std::optional(sinks) : std::nullopt,
                                              c10::make_intrusive<HeldOutput>(call));
  const int64_t divisor = output_divisor(call.settings().request.pattern);
  return divisor == 1 ? out : out / static_cast<double>(divisor);
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  return attention(q, k, v, PlannedCall(call));
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& sinks,
                     AttentionCall call) {
  call.sinks = true;
  return attention(q, k, v, PlannedCall(std::move(call)), sinks);
}

}  // namespace annulus
