// See merge.h.
#include "attention/kernels/merge.h"

#include <ATen/Parallel.h>

#include <limits>

#include "attention/kernels/merge_math.h"

namespace annulus {

#ifdef ANNULUS_CUDA
void merge_on_cuda(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index);  // merge_cuda.cc
#endif

namespace {

// One pass over the rows instead of six over the tensors.
template <typename T>
void merge_on_cpu(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                  const at::Tensor& index) {
  const int64_t batch = part_out.size(0), heads = part_out.size(1), rows = part_out.size(2), dim = part_out.size(3);
  const auto so = out.strides(), sl = lse.strides(), po = part_out.strides(), pl = part_lse.strides();
  T* const o_data = out.data_ptr<T>();
  T* const l_data = lse.data_ptr<T>();
  const T* const po_data = part_out.const_data_ptr<T>();
  const T* const pl_data = part_lse.const_data_ptr<T>();
  const int64_t* const to = index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1));
  at::parallel_for(0, batch * heads * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i = r % rows, h = r / rows % heads, b = r / rows / heads, own = to ? to[i] : i;
      T& mine = l_data[b * sl[0] + h * sl[1] + own * sl[2]];
      const T theirs = pl_data[b * pl[0] + h * pl[1] + i * pl[2]];
      if (theirs == -std::numeric_limits<T>::infinity()) continue;
      T* const o = o_data + b * so[0] + h * so[1] + own * so[2];
      const T* const p = po_data + b * po[0] + h * po[1] + i * po[2];
      if (mine == -std::numeric_limits<T>::infinity()) {
        mine = theirs;
        for (int64_t d = 0; d < dim; ++d) o[d] = p[d * po[3]];
        continue;
      }
      const MergeWeights<T> weights = merge_weights(mine, theirs);
      mine = weights.lse;
      for (int64_t d = 0; d < dim; ++d) o[d] += weights.share * (p[d * po[3]] - o[d]);
    }
  });
}

}  // namespace

void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index) {
#ifdef ANNULUS_CUDA
  if (out.is_cuda()) {
    const bool wide = out.scalar_type() == at::kDouble;
    return merge_on_cuda(out, lse, wide ? part_out.to(at::kDouble) : part_out, part_lse, index);
  }
#endif
  const at::Tensor part = part_out.to(out.scalar_type());
  if (out.scalar_type() == at::kFloat) return merge_on_cpu<float>(out, lse, part, part_lse, index);
  return merge_on_cpu<double>(out, lse, part, part_lse, index);
}

}  // namespace annulus
