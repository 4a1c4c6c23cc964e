// Operators of torch.ops.annulus for the program around attention: all_reduce, which sums gradients and losses over all
// ranks; rank and size; set_timeout, the deadline of operations between ranks; and release_ended_groups. python/annulus
// calls them.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

#include "comm/agreement.h"
#include "comm/c10d/groups.h"
#include "torch_ops/call.h"
#include "torch_ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// An error on one rank is raised on all of them. Otherwise the other ranks would add their tensors to those of the next
// call of this rank.
Tensor all_reduce_plain(const Tensor& x, std::string group) {
  const Turn turn = take_turn(group, x);
  const c10::OptionalDeviceGuard guard(at::device_of(x));
  const OpLabel label{"torch.ops.annulus.all_reduce", 0};
  Tensor sum;
  agree_together(*turn.comm, label, [&]() -> Terms {
    require(x.defined(), "all_reduce takes a tensor, but x is None");
    require(x.layout() == at::kStrided && (x.is_cpu() || (x.is_cuda() && !group.empty())),
            std::string("all_reduce takes a dense tensor on the CPU") + (group.empty() ? "" : " or a CUDA device") +
                ", but x is " + (x.layout() == at::kStrided ? "on " + x.device().str() : "sparse"));
    const at::ScalarType type = x.scalar_type();
    require(type == at::kFloat || type == at::kDouble || type == at::kLong,
            std::string("all_reduce takes fp32, fp64 and int64, so that sums are exact to the accumulator, but x is ") +
                c10::toString(type) + ": convert it first, for example with x.float()");
    sum = x.clone(at::MemoryFormat::Contiguous);
    return {};
  });
  turn.comm->all_reduce(sum, ReduceOp::kSum, label);
  return sum;
}

Tensor all_reduce_meta(const Tensor& x, std::string) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor all_reduce(const Tensor& x, const std::string& group) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("annulus::all_reduce", "")
                                 .typed<Tensor(const Tensor&, std::string)>();
  return handle.call(x, group);
}

// Autograd differentiates the sum of all ranks' losses. Each loss depends on the sum that all_reduce returns, so the
// gradient of x is the sum of the ranks' gradients. The backward is collective, as the forward is.
class AllReduceNode : public torch::autograd::Function<AllReduceNode> {
 public:
  static Tensor forward(AutogradContext* context, const Tensor& x, const std::string& group) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["group"] = group;
    return all_reduce(x, group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {all_reduce(grads[0], context->saved_data["group"].toStringRef()), Tensor()};
  }
};

Tensor all_reduce_autograd(const Tensor& x, std::string group) {
  return x.defined() ? AllReduceNode::apply(x, group) : all_reduce_plain(x, group);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(annulus, m) {
  // The sum over all ranks. Its backward sums the gradients over all ranks.
  m.def("all_reduce(Tensor x, *, str group=\"\") -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("rank(str group=\"\") -> int", [](std::string group) { return place_in(group).rank; });
  m.def("size(str group=\"\") -> int", [](std::string group) { return place_in(group).size; });
  // Drops what is kept of groups that destroy_process_group has ended (comm/c10d/groups.h).
  m.def("release_ended_groups() -> ()", [] { release_ended_groups(); });
  // Sets the seconds that an operation between ranks may take.
  m.def("set_timeout(float seconds) -> ()", [](double seconds) { set_timeout(seconds); });
}

TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) { m.impl("all_reduce", all_reduce_plain); }
TORCH_LIBRARY_IMPL(annulus, Meta, m) { m.impl("all_reduce", all_reduce_meta); }
TORCH_LIBRARY_IMPL(annulus, Autograd, m) { m.impl("all_reduce", all_reduce_autograd); }

}  // namespace annulus::torch_ops
