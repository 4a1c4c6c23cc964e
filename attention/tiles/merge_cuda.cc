// merge_parts on CUDA tensors. Built with --config=cuda; called by merge.cc. It has never run.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "attention/tiles/merge.h"
#include "attention/tiles/merge_cuda.h"

namespace annulus {
namespace {

MergeType type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return MergeType::kDouble;
    case at::kBFloat16:
      return MergeType::kBFloat16;
    case at::kHalf:
      return MergeType::kHalf;
    default:
      return MergeType::kFloat;
  }
}

MergeRows rows_of(const at::Tensor& values, const at::Tensor& lse, int64_t first = 0) {
  MergeRows r;
  if (!values.defined()) return r;
  r.values = values.data_ptr();
  r.first = first, r.rows = values.size(2);
  for (int64_t d = 0; d < 3; ++d) r.value_strides[d] = values.stride(d);
  if (!lse.defined()) return r;
  r.lse = lse.data_ptr();
  for (int64_t d = 0; d < 3; ++d) r.lse_strides[d] = lse.stride(d);
  return r;
}

bool in_fours(const at::Tensor& tensor) {
  if (!tensor.defined()) return true;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  bool fits = address % (4 * tensor.element_size()) == 0;
  for (int64_t d = 0; d < 3; ++d) fits = fits && (tensor.size(d) < 2 || tensor.stride(d) % 4 == 0);
  return fits;
}

}  // namespace

void merge_on_cuda(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                   const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index) {
  static_assert(MergeArguments::kMost == kMostParts);
  const c10::cuda::CUDAGuard guard(out.device());
  MergeArguments a;
  a.to = rows_of(out, lse);
  a.before = rows_of(before_out, before_lse);
  a.batch = out.size(0), a.heads = out.size(1), a.dim = out.size(3);
  a.rows = index.defined() ? index.numel() : out.size(2);
  a.index = index.defined() ? index.const_data_ptr<int64_t>() : nullptr;
  a.part_type = type_of(parts.empty() ? out : parts[0].out);
  a.narrow = a.part_type != MergeType::kFloat && a.part_type == type_of(out);
  a.aligned = a.dim % 4 == 0 && in_fours(out) && in_fours(before_out);
  for (const MergePart& part : parts) {
    a.parts[a.count++] = rows_of(part.out, part.lse, part.first);
    a.aligned = a.aligned && in_fours(part.out);
  }
  C10_CUDA_CHECK(launch_merge(a, at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace annulus
