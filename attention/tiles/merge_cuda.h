// The arguments that merge_cuda.cc, which works on LibTorch's tensors, passes to merge.cu, which nvcc compiles without
// LibTorch's headers. Internal to attention/tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace annulus {

enum class MergeType { kDouble, kFloat, kBFloat16, kHalf };

// Values [b, h, rows, D] and lse [b, h, rows]. Strides are in elements, and the last dimension of values is contiguous.
struct MergeRows {
  void* values = nullptr;  // null: not given
  void* lse = nullptr;     // null: values are summed without weights
  int64_t value_strides[3] = {}, lse_strides[3] = {};
  int64_t first = 0, rows = 0;  // for a part: the first row of the whole that it has, and the number of its rows
};

struct MergeArguments {
  static constexpr int kMost = 4;
  MergeRows to, before, parts[kMost];
  int count = 0;                   // the number of parts
  const int64_t* index = nullptr;  // [rows] or null: the row of `to` and `before` for each row of the only part
  int64_t batch = 0, heads = 0, rows = 0, dim = 0;
  MergeType part_type = MergeType::kFloat;
  bool narrow = false;   // whether `to` has the parts' type instead of the accumulator's
  bool aligned = false;  // whether four elements can be moved at once everywhere
};

// Starts the kernel on `stream`, and returns an error if that fails.

cudaError_t launch_merge(const MergeArguments& arguments, cudaStream_t stream);

}  // namespace annulus
