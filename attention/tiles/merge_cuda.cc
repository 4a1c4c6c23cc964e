// merge_parts on CUDA tensors. Built with --config=cuda; called by merge.cc.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include "attention/tiles/merge_row.h"

namespace annulus {

void merge_on_cuda(const at::Tensor& out, const MergeArguments& arguments) {
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(static_cast<cudaError_t>(launch_merge(arguments, at::cuda::getCurrentCUDAStream().stream())));
}

}  // namespace annulus
