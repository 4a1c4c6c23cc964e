// The device's side of merge_parts: what merge_cuda.cc (LibTorch's tensors) hands to merge.cu (nvcc, which is kept from
// LibTorch's headers). Internal to attention/tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace annulus {

enum class MergeType { kDouble, kFloat, kBFloat16, kHalf };

// [b, h, rows(, D)]: strides in elements, the last dimension of values contiguous.
struct MergeRows {
  void* values = nullptr;  // null: not given
  void* lse = nullptr;     // null: plain sums
  int64_t value_strides[3] = {}, lse_strides[3] = {};
  int64_t first = 0, rows = 0;  // of a part: which rows of the whole it has
};

struct MergeArguments {
  static constexpr int kMost = 4;
  MergeRows to, before, parts[kMost];
  int count = 0;                   // of parts
  const int64_t* index = nullptr;  // [rows]: the row of `to` and `before` of each row of the only part
  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  MergeType part_type = MergeType::kFloat;
  bool narrow = false;   // `to` has the parts' type, not the accumulator's
  bool aligned = false;  // four elements at once, everywhere
};

cudaError_t launch_merge(const MergeArguments& arguments, cudaStream_t stream);

}  // namespace annulus
