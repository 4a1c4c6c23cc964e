// The groups of threads (norm.h) in CUDA, and the launch of kernels. Included by the CUDA sources of this folder. It
// has never run on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "runtime/model/gpu/elements.h"
#include "runtime/model/gpu/norm.h"

namespace annulus::gpu {

// A group of one warp, several of which share a block, synchronizes only that warp. A larger group is a block.
template <int kWarps>
class CudaGroup {
 public:
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kInBlock = kWarps == 1 ? 4 : 1;

  __device__ CudaGroup(int64_t worker, int64_t workers) : worker_(worker), workers_(workers) {}

  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int64_t worker() const { return worker_; }
  __device__ int64_t workers() const { return workers_; }

  __device__ void sync() const {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  template <int kNeighbours = kThreads>
  __device__ float sum(float x) const {
    return over<kNeighbours>(x, [](float a, float b) { return a + b; });
  }
  __device__ float most(float x) const {
    return over<kThreads>(x, [](float a, float b) { return fmaxf(a, b); });
  }
  template <int kApart>
  __device__ float sum_across(float x) const {
    static_assert(kWarps == 1);
#pragma unroll
    for (int distance = kWarp / 2; distance >= kApart; distance /= 2) x += __shfl_xor_sync(0xffffffffU, x, distance);
    return x;
  }

  __device__ float sum_of_warps(float x) const {
    __shared__ float shared[kThreads];
    shared[threadIdx.x] = x;
    __syncthreads();
    float total = 0;
    if (threadIdx.x < kWarp) {
      total = x;
      for (int warp = 1; warp < kWarps; ++warp) total += shared[warp * kWarp + threadIdx.x];
    }
    __syncthreads();
    return total;
  }

 private:
  template <int kNeighbours, typename Combine>
  __device__ float over(float x, const Combine& combine) const {
    static_assert(kNeighbours <= kWarp || kNeighbours == kThreads);
#pragma unroll
    for (int distance = (kNeighbours < kWarp ? kNeighbours : kWarp) / 2; distance > 0; distance /= 2) {
      x = combine(x, __shfl_xor_sync(0xffffffffU, x, distance));
    }
    if constexpr (kNeighbours > kWarp) {
      __shared__ float shared[kWarps];
      if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
      __syncthreads();
      x = shared[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) x = combine(x, shared[warp]);
      __syncthreads();  // before the memory is used again
    }
    return x;
  }

  int64_t worker_, workers_;
};

// The launch bounds limit the registers of a thread so that kWarpsAtOnce warps fit on a multiprocessor: 64 warps with
// 32 registers per thread, or 32 with 64.
template <typename Kernel>
__global__ void __launch_bounds__(CudaGroup<Kernel::kWarps>::kThreads* CudaGroup<Kernel::kWarps>::kInBlock,
                                  Kernel::kWarpsAtOnce / (Kernel::kWarps * CudaGroup<Kernel::kWarps>::kInBlock))
    run(Kernel kernel, int64_t workers) {
  using Group = CudaGroup<Kernel::kWarps>;
  const int64_t worker = static_cast<int64_t>(blockIdx.x) * Group::kInBlock + threadIdx.y;
  if (worker >= workers) return;  // for all threads of the group
  Group group(worker, workers);
  kernel(group);
}

// Launches a kernel with `workers` groups, or as many as a grid can have.
template <typename Kernel>
cudaError_t start(const Kernel& kernel, int64_t workers, cudaStream_t stream) {
  using Group = CudaGroup<Kernel::kWarps>;
  workers = std::min<int64_t>(workers, INT32_MAX);
  if (workers == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((workers + Group::kInBlock - 1) / Group::kInBlock);
  run<<<blocks, dim3(Group::kThreads, Group::kInBlock), 0, stream>>>(kernel, workers);
  return cudaGetLastError();
}

// Chooses a kernel for the arguments (`choose` of their header) and launches it.
template <typename Arguments>
cudaError_t start_chosen(const Arguments& arguments, cudaStream_t stream) {
  cudaError_t result = cudaSuccess;
  choose(arguments, [&](const auto& kernel, int64_t workers) { result = start(kernel, workers, stream); });
  return result;
}

}  // namespace annulus::gpu
