// Launches kernels on `stream`; returns launch errors. Separates launcher_cuda.cc, which uses LibTorch's streams, from
// the CUDA sources, which nvcc compiles without most of LibTorch's headers. Internal to runtime/model/gpu.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/model/gpu/cross_entropy.h"
#include "runtime/model/gpu/norm.h"
#include "runtime/model/gpu/rotary.h"
#include "runtime/model/gpu/swiglu.h"

namespace annulus::gpu {

cudaError_t launch(const NormArguments& arguments, cudaStream_t stream);          // norm.cu
cudaError_t launch(const NormGradientArguments& arguments, cudaStream_t stream);  // norm_gradient.cu
cudaError_t launch(const ColumnArguments& arguments, cudaStream_t stream);        // norm_gradient.cu
cudaError_t launch(const RotaryArguments& arguments, cudaStream_t stream);        // elementwise.cu
cudaError_t launch(const SwiGluArguments& arguments, cudaStream_t stream);        // elementwise.cu
cudaError_t launch(const CrossEntropyArguments& arguments, cudaStream_t stream);  // cross_entropy.cu

}  // namespace annulus::gpu
