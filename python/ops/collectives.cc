// Operators of torch.ops.annulus for the program around attention: all_reduce, which sums gradients and losses over all
// ranks; rank and size; set_timeout, the deadline of operations between ranks; and release_ended_groups. python/annulus
// calls them.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "comm/agreement.h"
#include "comm/c10d/groups.h"
#include "python/ops/call.h"
#include "python/ops/world.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

// The sum, and the number of the call (Communicator::number_call), int64 without dimensions on the CPU.
using Numbered = std::tuple<Tensor, Tensor>;

// An error on one rank is raised on all of them. Otherwise the other ranks would add their tensors to those of the next
// call of this rank. `backward_of` is the number of the call whose backward this is, if it is one.
Numbered all_reduce_numbered(const Tensor& x, const MaybeTensor& backward_of, std::string group) {
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
    if (!backward_of || !backward_of->defined()) return {{{"call", "forward"}}, {}};
    return {{{"call", "backward"}, backward_term(number_of(*backward_of))}, {}};
  });
  const int64_t number = turn.comm->number_call();
  turn.comm->all_reduce(sum, ReduceOp::kSum, label);
  return {sum, at::full({}, number, at::kLong)};
}

Numbered all_reduce_numbered_meta(const Tensor& x, const MaybeTensor&, std::string) {
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty({}, x.options().dtype(at::kLong))};
}

Numbered call_numbered(const Tensor& x, const MaybeTensor& backward_of, const std::string& group) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("annulus::all_reduce_numbered", "")
                                 .typed<Numbered(const Tensor&, const MaybeTensor&, std::string)>();
  return handle.call(x, backward_of, group);
}

// Autograd differentiates the sum of all ranks' losses. Each loss depends on the sum that all_reduce returns, so the
// gradient of x is the sum of the ranks' gradients. The backward is collective, as the forward is, and has a number and
// a backward of its own.
class AllReduceNode : public torch::autograd::Function<AllReduceNode> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& x, const MaybeTensor& backward_of,
                               const std::string& group) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [sum, number] = call_numbered(x, backward_of, group);
    context->save_for_backward({number});
    context->saved_data["group"] = group;
    return {sum, number};
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const Tensor number = context->get_saved_variables()[0];
    const std::string& group = context->saved_data["group"].toStringRef();
    return {std::get<0>(call_numbered(grads[0], number, group)), Tensor(), Tensor()};
  }
};

Numbered all_reduce_numbered_autograd(const Tensor& x, const MaybeTensor& backward_of, std::string group) {
  if (!x.defined()) return all_reduce_numbered(x, backward_of, group);
  const variable_list results = AllReduceNode::apply(x, backward_of, group);
  return {results[0], results[1]};
}

Tensor all_reduce(const Tensor& x, std::string group) { return std::get<0>(call_numbered(x, std::nullopt, group)); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(annulus, m) {
  // The sum over all ranks. Its backward sums the gradients over all ranks.
  m.def("all_reduce(Tensor x, *, str group=\"\") -> Tensor", {at::Tag::pt2_compliant_tag});
  // What all_reduce calls.
  m.def("all_reduce_numbered(Tensor x, Tensor? backward_of, str group) -> (Tensor sum, Tensor number)",
        {at::Tag::pt2_compliant_tag});
  m.def("rank(str group=\"\") -> int", [](std::string group) { return place_in(group).rank; });
  m.def("size(str group=\"\") -> int", [](std::string group) { return place_in(group).size; });
  // Drops what is kept of groups that destroy_process_group has ended (comm/c10d/groups.h).
  m.def("release_ended_groups() -> ()", [] { release_ended_groups(); });
  // Sets the seconds that an operation between ranks may take.
  m.def("set_timeout(float seconds) -> ()", [](double seconds) { set_timeout(seconds); });
}

TORCH_LIBRARY_IMPL(annulus, CompositeExplicitAutograd, m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_numbered", all_reduce_numbered);
}
TORCH_LIBRARY_IMPL(annulus, Meta, m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_numbered", all_reduce_numbered_meta);
}
TORCH_LIBRARY_IMPL(annulus, Autograd, m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_numbered", all_reduce_numbered_autograd);
}

}  // namespace annulus::torch_ops
