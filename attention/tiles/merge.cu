// Merges partial results on a GPU in one pass over memory; LibTorch's operators would need six passes for each part.
// Called by merge_cuda.cc. It has never run on a GPU; merge_row.h, which has all of its work, is tested on a CPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "attention/tiles/merge_row.h"

namespace annulus {
namespace {

template <typename A, typename P, typename O, int kWidth>
__global__ void __launch_bounds__(kMergeLanes* kMergeWarps) merge_rows(const __grid_constant__ MergeArguments a) {
  const MergeThread thread{
      blockIdx.x, blockIdx.y, blockIdx.z, gridDim.y, static_cast<int>(threadIdx.y), static_cast<int>(threadIdx.x)};
  MergeWork<A, P, O, kWidth>(a, thread).run();
}

struct Launch {
  const MergeArguments& arguments;
  const dim3 grid;
  const cudaStream_t stream;

  template <typename A, typename P, typename O, int kWidth>
  cudaError_t run() const {
    merge_rows<A, P, O, kWidth><<<grid, dim3(kMergeLanes, kMergeWarps), 0, stream>>>(arguments);
    return cudaGetLastError();
  }
};

}  // namespace

int launch_merge(const MergeArguments& arguments, CUstream_st* stream) {
  const MergeGrid grid = merge_grid(arguments);
  if (grid.empty()) return cudaSuccess;
  if (!grid.fits()) return cudaErrorInvalidConfiguration;
  const dim3 blocks(static_cast<unsigned>(grid.heads), static_cast<unsigned>(grid.rows),
                    static_cast<unsigned>(grid.batch));
  return with_merge_types<__nv_bfloat16, __half>(arguments, Launch{arguments, blocks, stream});
}

}  // namespace annulus
