// torch.autocast for attention and attention_with_lse of torch.ops.annulus, by the rule of PyTorch's own attention: q,
// k and v become tensors of the region's dtype. It is a file of its own because PyTorch's header for autocast is large.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "python/ops/call.h"

namespace annulus::torch_ops {
namespace {

using at::Tensor;

template <typename... P>
struct Autocast {
  template <typename Result>
  using Operator = c10::TypedOperatorHandle<Result(const Tensor&, const Tensor&, const Tensor&, P...,
                                                   const std::optional<Tensor>&, const std::optional<Tensor>&)>;

  template <typename Result>
  static Operator<Result> find(const char* name) {
    using Signature = Result(const Tensor&, const Tensor&, const Tensor&, P..., const std::optional<Tensor>&,
                             const std::optional<Tensor>&);
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
  }

  // The sinks stay as they are, because they are added in the accumulator's dtype.
  //
  // Casts q, k and v to the region's dtype unless one of them is fp64, which a user chooses on purpose. Autograd sees
  // the casts, so gradients have the dtypes of the given tensors.
  template <at::DeviceType device, typename Result>
  static Result cast(const Operator<Result>& op, const Tensor& q, const Tensor& k, const Tensor& v, const P&... p,
                     const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sinks) {
    const c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const std::array<const Tensor*, 3> given = {&q, &k, &v};
    const bool casts = std::all_of(given.begin(), given.end(), [](const Tensor* t) {
      return t->defined() && t->is_floating_point() && t->scalar_type() != at::kDouble;
    });
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    const auto as = [&](const Tensor& t) { return casts ? at::autocast::cached_cast(dtype, t, device) : t; };
    return op.call(as(q), as(k), as(v), p..., cu_seqlens, sinks);
  }

  template <at::DeviceType device>
  static Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, P... p,
                          const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sinks) {
    static const auto op = find<Tensor>("annulus::attention");
    return cast<device, Tensor>(op, q, k, v, p..., cu_seqlens, sinks);
  }
  template <at::DeviceType device>
  static std::tuple<Tensor, Tensor> attention_with_lse(const Tensor& q, const Tensor& k, const Tensor& v, P... p,
                                                       const std::optional<Tensor>& cu_seqlens,
                                                       const std::optional<Tensor>& sinks) {
    static const auto op = find<std::tuple<Tensor, Tensor>>("annulus::attention_with_lse");
    return cast<device, std::tuple<Tensor, Tensor>>(op, q, k, v, p..., cu_seqlens, sinks);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(annulus, AutocastCPU, m) {
  m.impl("attention", WithSettings<Autocast>::attention<at::kCPU>);
  m.impl("attention_with_lse", WithSettings<Autocast>::attention_with_lse<at::kCPU>);
}
TORCH_LIBRARY_IMPL(annulus, AutocastCUDA, m) {
  m.impl("attention", WithSettings<Autocast>::attention<at::kCUDA>);
  m.impl("attention_with_lse", WithSettings<Autocast>::attention_with_lse<at::kCUDA>);
}

}  // namespace annulus::torch_ops
