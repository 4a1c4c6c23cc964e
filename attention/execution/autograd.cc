// The autograd node around attention_forward and attention_backward: attention() and KeptCall of attention.h.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "attention/execution/attention.h"
#include "common/error.h"

namespace annulus {
namespace {

// The call travels from forward to backward as an opaque value of the node.
struct CallHolder : torch::CustomClassHolder {
  explicit CallHolder(const AttentionCall& c) : kept(c) {}
  const KeptCall kept;
  std::shared_ptr<const Program> program;  // the program that the forward ran
  int64_t number = 0;
  Finite own_keys = Finite::kUnknown;
};

class AttentionNode : public torch::autograd::Function<AttentionNode> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const c10::intrusive_ptr<CallHolder>& holder) {
    // A kernel may return a view of its own storage. Autograd must not treat it as a view, so that callers may change
    // the result in place.
    const at::AutoDispatchBelowADInplaceOrView below;
    const AttentionOutput result = attention_forward(q, k, v, holder->kept.call());
    context->save_for_backward({q, k, v, result.out, result.lse, result.saved_k, result.saved_v});
    holder->program = result.program;
    holder->number = result.number;
    holder->own_keys = result.own_keys;
    context->saved_data["call"] = c10::IValue::make_capsule(holder);
    return result.out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const auto holder = c10::static_intrusive_pointer_cast<CallHolder>(context->saved_data["call"].toCapsule());
    const AttentionGradients result =
        attention_backward(grads[0], saved[0], saved[1], saved[2],
                           {holder->program, saved[3], saved[4], saved[5], saved[6], holder->own_keys, holder->number},
                           holder->kept.call());
    return {result.dq, result.dk, result.dv, at::Tensor()};
  }
};

}  // namespace

KeptCall::KeptCall(AttentionCall call) : call_(std::move(call)) {
  if (call_.comm == nullptr) return;  // the call itself will raise the error, on all ranks alike
  comm_ = call_.comm->weak_from_this().lock();
  if (comm_ == nullptr) {
    throw Error(ErrorKind::kUsage, "attention",
                call_.label + ": the backward needs the communicator, too; create it as a std::shared_ptr");
  }
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call) {
  const at::Tensor out = AttentionNode::apply(q, k, v, c10::make_intrusive<CallHolder>(call));
  const int64_t divisor = output_divisor(call.request.pattern);
  return divisor == 1 ? out : out / static_cast<double>(divisor);
}

}  // namespace annulus
