// Compiles rotary.h and swiglu.h for GPUs. Called by launcher_cuda.cc.
#include "runtime/model/gpu/cuda_group.h"
#include "runtime/model/gpu/cuda_launch.h"

namespace annulus::gpu {

cudaError_t launch(const RotaryArguments& arguments, cudaStream_t stream) { return start_chosen(arguments, stream); }
cudaError_t launch(const SwiGluArguments& arguments, cudaStream_t stream) { return start_chosen(arguments, stream); }

}  // namespace annulus::gpu
