// The device's side of merge_partial: what merge_cuda.cc (LibTorch's tensors) hands to merge.cu (nvcc, which is kept
// from LibTorch's headers). Internal to attention/kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace annulus {

enum class MergeType { kDouble, kFloat, kBFloat16, kHalf };  // of the part's out; the rest is fp64 or fp32

// Strides are of [b, h, rows], in elements; the last dimension of out and part is contiguous.
struct MergeArguments {
  void* out = nullptr;
  void* lse = nullptr;
  const void* part_out = nullptr;
  const void* part_lse = nullptr;
  const int64_t* index = nullptr;  // [rows]: the row of out and lse of each row of the part; null: the same
  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  int64_t out_strides[3] = {}, lse_strides[3] = {}, part_strides[3] = {}, part_lse_strides[3] = {};
  MergeType type = MergeType::kFloat;
  bool aligned = false;  // four elements at once, of out and of part
};

cudaError_t launch_merge(const MergeArguments& arguments, cudaStream_t stream);

}  // namespace annulus
