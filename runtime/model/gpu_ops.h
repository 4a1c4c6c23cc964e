// The decoder's operations (decoder_ops.h) by fused kernels for GPUs (runtime/model/gpu/), for fp32, bf16 and fp16.
// Used by fused_ops.cc. The kernels have never run on a GPU; tests run them on a CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "runtime/model/decoder_ops.h"

namespace annulus {

// Returns whether the kernels support this tensor: one of their dtypes, on a device with a launcher
// (runtime/model/gpu/launcher.h), contiguous, not empty, no dimension of 2^30 or more after the first.
bool kernels_take(const at::Tensor& tensor);

// Returns the operations, for tensors that all satisfy kernels_take() and have one dtype, except targets, and
// statistics, tables and logits, which are fp32. Work goes to the device's current stream. The order of sums depends
// only on shapes, so the same tensors give the same bits on every device.
const DecoderOps& kernel_ops();

// Returns the bytes of the partial sums of RMSNorm's weight gradient, for tensors [rows, dim] of this dtype.
int64_t kernel_norm_sums(int64_t rows, int64_t dim, at::ScalarType dtype);

}  // namespace annulus
