// merge_partial on CUDA tensors. Built with --config=cuda; called by merge.cc.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "attention/kernels/merge_cuda.h"

namespace annulus {

void merge_on_cuda(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index) {
  const c10::cuda::CUDAGuard guard(out.device());
  MergeArguments a;
  a.out = out.data_ptr();
  a.lse = lse.data_ptr();
  a.part_out = part_out.const_data_ptr();
  a.part_lse = part_lse.const_data_ptr();
  a.index = index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  a.batch = part_out.size(0), a.heads = part_out.size(1), a.rows = part_out.size(2), a.dim = part_out.size(3);
  const auto fill = [](int64_t(&strides)[3], const at::Tensor& tensor) {
    for (int64_t d = 0; d < 3; ++d) strides[d] = tensor.stride(d);
  };
  fill(a.out_strides, out);
  fill(a.lse_strides, lse);
  fill(a.part_strides, part_out);
  fill(a.part_lse_strides, part_lse);
  const at::ScalarType type = part_out.scalar_type();
  a.type = type == at::kDouble     ? MergeType::kDouble
           : type == at::kFloat    ? MergeType::kFloat
           : type == at::kBFloat16 ? MergeType::kBFloat16
                                   : MergeType::kHalf;
  const auto in_fours = [](const at::Tensor& tensor) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    bool fits = address % (4 * tensor.element_size()) == 0;
    for (int64_t d = 0; d < 3; ++d) fits = fits && (tensor.size(d) < 2 || tensor.stride(d) % 4 == 0);
    return fits;
  };
  a.aligned = a.dim % 4 == 0 && in_fours(out) && in_fours(part_out);
  C10_CUDA_CHECK(launch_merge(a, at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace annulus
