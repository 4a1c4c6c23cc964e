// Merging partial results on a GPU in one pass over memory: composed of LibTorch's operators it is six. Called by
// merge_cuda.cc.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "attention/kernels/merge_cuda.h"
#include "attention/kernels/merge_math.h"

namespace annulus {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;  // of a block, each with a row of its own

template <typename A>
__device__ A converted(float x) {
  return x;
}
template <typename A>
__device__ A converted(double x) {
  return static_cast<A>(x);
}
template <typename A>
__device__ A converted(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
template <typename A>
__device__ A converted(__half x) {
  return __half2float(x);
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T value[kWidth];
};

// A: the accumulator's type, P: the part's, kWidth: elements that a thread moves at once.
template <typename A, typename P, int kWidth>
__global__ void __launch_bounds__(kWarp* kWarps) merge_rows(MergeArguments a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.y;
  if (row >= a.batch * a.rows * a.heads) return;
  // Heads lie side by side in memory: neighbouring warps take neighbouring heads.
  const int64_t h = row % a.heads, i = row / a.heads % a.rows, b = row / a.heads / a.rows;
  const int64_t to = a.index != nullptr ? a.index[i] : i;
  A* const lse = static_cast<A*>(a.lse) + b * a.lse_strides[0] + h * a.lse_strides[1] + to * a.lse_strides[2];
  const A theirs = static_cast<const A*>(
      a.part_lse)[b * a.part_lse_strides[0] + h * a.part_lse_strides[1] + i * a.part_lse_strides[2]];
  if (theirs == -INFINITY) return;  // no key: the part's out may hold anything
  const A mine = *lse;
  const bool first = mine == -INFINITY;
  const MergeWeights<A> weights = first ? MergeWeights<A>{1, theirs} : merge_weights(mine, theirs);
  A* const out = static_cast<A*>(a.out) + b * a.out_strides[0] + h * a.out_strides[1] + to * a.out_strides[2];
  const P* const part =
      static_cast<const P*>(a.part_out) + b * a.part_strides[0] + h * a.part_strides[1] + i * a.part_strides[2];
  for (int64_t d = static_cast<int64_t>(threadIdx.x) * kWidth; d < a.dim; d += kWarp * kWidth) {
    const Pack<P, kWidth> p = *reinterpret_cast<const Pack<P, kWidth>*>(part + d);
    Pack<A, kWidth>* const o = reinterpret_cast<Pack<A, kWidth>*>(out + d);
    Pack<A, kWidth> merged;
    if (!first) merged = *o;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const A x = converted<A>(p.value[e]);
      // Where there was nothing, out may hold anything.
      merged.value[e] = first ? x : merged.value[e] + weights.share * (x - merged.value[e]);
    }
    *o = merged;
  }
  __syncwarp();  // all lanes have read lse
  if (threadIdx.x == 0) *lse = weights.lse;
}

template <typename A, typename P>
cudaError_t launch(const MergeArguments& a, cudaStream_t stream) {
  const int64_t rows = a.batch * a.rows * a.heads;
  if (rows == 0 || a.dim == 0) return cudaSuccess;
  const int64_t blocks = (rows + kWarps - 1) / kWarps;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 threads(kWarp, kWarps);
  if (a.aligned) {
    merge_rows<A, P, 4><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(a);
  } else {
    merge_rows<A, P, 1><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_merge(const MergeArguments& arguments, cudaStream_t stream) {
  switch (arguments.type) {
    case MergeType::kDouble:
      return launch<double, double>(arguments, stream);
    case MergeType::kFloat:
      return launch<float, float>(arguments, stream);
    case MergeType::kBFloat16:
      return launch<float, __nv_bfloat16>(arguments, stream);
    case MergeType::kHalf:
      return launch<float, __half>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace annulus
