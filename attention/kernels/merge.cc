// See merge.h.
#include "attention/kernels/merge.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace annulus {
namespace {

// One pass over the rows instead of six over the tensors.
template <typename T>
void merge_on_cpu(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out,
                  const at::Tensor& part_lse) {
  const int64_t batch = out.size(0), heads = out.size(1), rows = out.size(2), dim = out.size(3);
  const auto so = out.strides(), sl = lse.strides(), po = part_out.strides(), pl = part_lse.strides();
  T* const o_data = out.data_ptr<T>();
  T* const l_data = lse.data_ptr<T>();
  const T* const po_data = part_out.const_data_ptr<T>();
  const T* const pl_data = part_lse.const_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1));
  at::parallel_for(0, batch * heads * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = r % rows, h = r / rows % heads, b = r / rows / heads;
      T& mine = l_data[b * sl[0] + h * sl[1] + i * sl[2]];
      const T theirs = pl_data[b * pl[0] + h * pl[1] + i * pl[2]];
      if (theirs == -std::numeric_limits<T>::infinity()) continue;
      T* const o = o_data + b * so[0] + h * so[1] + i * so[2];
      const T* const p = po_data + b * po[0] + h * po[1] + i * po[2];
      if (mine == -std::numeric_limits<T>::infinity()) {
        mine = theirs;
        for (int64_t d = 0; d < dim; ++d) o[d] = p[d * po[3]];
        continue;
      }
      // sigmoid(theirs - mine) and softplus(theirs - mine), from the smaller exponential: no overflow.
      const T difference = theirs - mine, e = std::exp(-std::abs(difference));
      const T share = difference >= 0 ? 1 / (1 + e) : e / (1 + e);
      mine = std::max(mine, theirs) + std::log1p(e);
      for (int64_t d = 0; d < dim; ++d) o[d] += share * (p[d * po[3]] - o[d]);
    }
  });
}

}  // namespace

void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out,
                   const at::Tensor& part_lse) {
  if (out.is_cpu() && out.scalar_type() == at::kFloat) return merge_on_cpu<float>(out, lse, part_out, part_lse);
  if (out.is_cpu() && out.scalar_type() == at::kDouble) return merge_on_cpu<double>(out, lse, part_out, part_lse);
  const at::Tensor merged = at::logaddexp(lse, part_lse);  // -inf with -inf gives -inf
  const at::Tensor empty = part_lse == -std::numeric_limits<double>::infinity();
  const at::Tensor share = (part_lse - merged).exp().masked_fill(empty, 0).unsqueeze(-1);
  out.add_(at::where(share == 0, at::zeros({}, out.options()), share * (part_out - out)));
  lse.copy_(merged);
}

}  // namespace annulus
