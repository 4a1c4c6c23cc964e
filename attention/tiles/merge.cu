// Merges partial results on a GPU in one pass over memory; LibTorch's operators would need six passes for each part.
// Called by merge_cuda.cc. It has never run on a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/tiles/merge_cuda.h"

namespace annulus {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 4;  // the warps of a block, each of which computes a row of its own

template <typename A, typename T>
__device__ A widened(T x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __half2float(x);
  } else {
    return static_cast<A>(x);
  }
}
template <typename T, typename A>
__device__ T narrowed(A x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half(x);
  } else {
    return static_cast<T>(x);
  }
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T value[kWidth];
};

template <typename T>
__device__ T* values_at(const MergeRows& r, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(r.values) + b * r.value_strides[0] + h * r.value_strides[1] + row * r.value_strides[2];
}
template <typename T>
__device__ T* lse_at(const MergeRows& r, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(r.lse) + b * r.lse_strides[0] + h * r.lse_strides[1] + row * r.lse_strides[2];
}

// A is the type of the accumulator, P that of the parts, and O that of the result. kWidth is the number of elements
// that a thread moves at once. A warp computes one row of one head; neighbouring blocks compute neighbouring heads,
// which are adjacent in memory.
template <typename A, typename P, typename O, int kWidth>
__global__ void __launch_bounds__(kWarp* kWarps) merge_rows(MergeArguments a) {
  constexpr int kBefore = MergeArguments::kMost;
  const int64_t h = blockIdx.x, b = blockIdx.z;
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.y; i < a.rows;
       i += static_cast<int64_t>(gridDim.y) * kWarps) {
    const int64_t row = a.index != nullptr ? a.index[i] : i;
    const bool sums = a.to.lse == nullptr;
    A weight[MergeArguments::kMost + 1];  // at first lse; the last element is for what was held before
    A most = -INFINITY;
#pragma unroll
    for (int p = 0; p < MergeArguments::kMost; ++p) {
      const int64_t own = a.index != nullptr ? i : i - a.parts[p].first;
      const bool there = p < a.count && own >= 0 && own < a.parts[p].rows;
      weight[p] = !there ? -INFINITY : sums ? A(0) : *lse_at<const A>(a.parts[p], b, h, own);
      most = max(most, weight[p]);
    }
    const bool nothing_new = most == -INFINITY;
    const bool held = a.before.values != nullptr;
    weight[kBefore] = !held ? -INFINITY : sums ? A(0) : *lse_at<const A>(a.before, b, h, row);
    most = max(most, weight[kBefore]);
    if (nothing_new && a.before.values == a.to.values) continue;  // merging in place: the row stays as it is
    A sum = 0;
#pragma unroll
    for (int p = 0; p <= kBefore; ++p) {
      // If nothing was held before, or a part has no key, the values may be anything and are not read. A NaN lse is
      // kept.
      weight[p] = weight[p] == -INFINITY ? A(0) : sums ? A(1) : exp(weight[p] - most);
      sum += weight[p];
    }
    if (!sums && sum != 0) {
#pragma unroll
      for (int p = 0; p <= kBefore; ++p) weight[p] /= sum;
    }
    O* const to = values_at<O>(a.to, b, h, row);
    for (int64_t d = static_cast<int64_t>(threadIdx.x) * kWidth; d < a.dim; d += kWarp * kWidth) {
      A result[kWidth] = {};
      if (weight[kBefore] != 0) {
        const auto values = *reinterpret_cast<const Pack<A, kWidth>*>(values_at<const A>(a.before, b, h, row) + d);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) result[e] = weight[kBefore] * values.value[e];
      }
#pragma unroll
      for (int p = 0; p < MergeArguments::kMost; ++p) {
        if (weight[p] != 0) {
          const int64_t own = a.index != nullptr ? i : i - a.parts[p].first;
          const auto values = *reinterpret_cast<const Pack<P, kWidth>*>(values_at<const P>(a.parts[p], b, h, own) + d);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) result[e] += weight[p] * widened<A>(values.value[e]);
        }
      }
      Pack<O, kWidth> packed;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) packed.value[e] = narrowed<O>(result[e]);
      *reinterpret_cast<Pack<O, kWidth>*>(to + d) = packed;
    }
    __syncwarp();  // all lanes have read what was held before
    if (!sums && threadIdx.x == 0) *lse_at<A>(a.to, b, h, row) = sum == 0 ? -INFINITY : most + log(sum);
  }
}

template <typename A, typename P, typename O>
cudaError_t launch(const MergeArguments& a, cudaStream_t stream) {
  if (a.rows == 0 || a.dim == 0 || a.heads == 0 || a.batch == 0) return cudaSuccess;
  constexpr int64_t kMostBlocks = 65535;  // the limit of the second and third dimension of a grid
  if (a.batch > kMostBlocks || a.heads > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t blocks = std::min<int64_t>((a.rows + kWarps - 1) / kWarps, kMostBlocks);
  const dim3 grid(static_cast<unsigned>(a.heads), static_cast<unsigned>(blocks), static_cast<unsigned>(a.batch));
  const dim3 threads(kWarp, kWarps);
  if (a.aligned) {
    merge_rows<A, P, O, 4><<<grid, threads, 0, stream>>>(a);
  } else {
    merge_rows<A, P, O, 1><<<grid, threads, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

template <typename P>
cudaError_t launch_to(const MergeArguments& a, cudaStream_t stream) {
  return a.narrow ? launch<float, P, P>(a, stream) : launch<float, P, float>(a, stream);
}

}  // namespace

cudaError_t launch_merge(const MergeArguments& arguments, cudaStream_t stream) {
  switch (arguments.part_type) {
    case MergeType::kDouble:
      return launch<double, double, double>(arguments, stream);
    case MergeType::kFloat:
      return launch<float, float, float>(arguments, stream);
    case MergeType::kBFloat16:
      return launch_to<__nv_bfloat16>(arguments, stream);
    case MergeType::kHalf:
      return launch_to<__half>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace annulus
