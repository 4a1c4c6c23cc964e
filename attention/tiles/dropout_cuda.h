// The device's side of dropout_factors: what dropout_cuda.cc (LibTorch's tensors) hands to dropout.cu. Internal to
// attention/tiles.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace annulus {

struct DropoutArguments {
  uint8_t* kept = nullptr;               // [rows, queries, keys]
  const int64_t* philox_keys = nullptr;  // [rows], a row being a head of a batch row; on the device
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t first_query = 0, query_stride = 1, first_key = 0, key_stride = 1;  // positions
  uint64_t threshold = 0;  // of 2^32 values, those below drop the pair
};

cudaError_t launch_dropout(const DropoutArguments& arguments, cudaStream_t stream);

}  // namespace annulus
