// torch.autocast for torch.ops.annulus.attention: the rule of PyTorch's own attention, by which mixed dtypes become
// those of the region. A file of its own, because the header for it is large.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>

namespace annulus::torch_ops {
namespace {

using at::Tensor;

using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, std::string, std::string, std::string, double,
                         double, c10::SymInt, c10::SymInt, int64_t, c10::SymInt, c10::SymInt);

// To the region's dtype, unless one of q, k and v is fp64: who computes in that means it. Casts are seen by autograd,
// so gradients have the dtypes of what was given.
Tensor attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, std::string pattern, std::string layout,
                          std::string schedule, double scale, double dropout, c10::SymInt seed, c10::SymInt step,
                          int64_t layer, c10::SymInt first_row, c10::SymInt query_offset) {
  static const auto attention =
      c10::Dispatcher::singleton().findSchemaOrThrow("annulus::attention", "").typed<Signature>();
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastCPU);
  const std::array<const Tensor*, 3> given = {&q, &k, &v};
  const bool casts = std::all_of(given.begin(), given.end(), [](const Tensor* t) {
    return t->defined() && t->is_floating_point() && t->scalar_type() != at::kDouble;
  });
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(at::kCPU);
  const auto as = [&](const Tensor& t) { return casts ? at::autocast::cached_cast(dtype, t, at::kCPU) : t; };
  return attention.call(as(q), as(k), as(v), pattern, layout, schedule, scale, dropout, seed, step, layer, first_row,
                        query_offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(annulus, AutocastCPU, m) { m.impl("attention", attention_autocast); }

}  // namespace annulus::torch_ops
