// The arguments that dropout_cuda.cc, which works on LibTorch's tensors, passes to the kernel in dropout.cu. Internal
// to attention/dropout.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace annulus {

struct DropoutArguments {
  uint8_t* kept = nullptr;               // [rows, queries, keys] on the device: 1 for kept pairs, 0 for dropped ones
  const int64_t* philox_keys = nullptr;  // [rows] on the device; a row is a head of a batch row
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t first_query = 0, query_stride = 1, first_key = 0, key_stride = 1;  // positions
  uint64_t threshold = 0;                                                    // a pair is dropped if its word is below
};

// Launches the kernel on `stream`; returns the error of the launch.
cudaError_t launch_dropout(const DropoutArguments& arguments, cudaStream_t stream);

}  // namespace annulus
