// Compiles the backward of norm.h for GPUs. Called by launcher_cuda.cc.
#include "runtime/model/gpu/cuda_group.h"
#include "runtime/model/gpu/cuda_launch.h"

namespace annulus::gpu {

cudaError_t launch(const NormGradientArguments& arguments, cudaStream_t stream) {
  return start_chosen(arguments, stream);
}
cudaError_t launch(const ColumnArguments& arguments, cudaStream_t stream) { return start_chosen(arguments, stream); }

}  // namespace annulus::gpu
