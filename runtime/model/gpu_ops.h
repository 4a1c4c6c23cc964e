// The decoder's operations (decoder_ops.h) by kernels for GPUs (runtime/model/gpu/), for fp32, bf16 and fp16: each
// passes once over its tensors. Used by fused_ops.cc. The kernels have never run on a GPU; tests run them on a CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "runtime/model/decoder_ops.h"

namespace annulus {

// Whether the kernels can compute with this tensor: one of their dtypes, on a device with a launcher
// (runtime/model/gpu/launcher.h), contiguous, not empty, no dimension of 2^30 or more after the first.
bool kernels_take(const at::Tensor& tensor);

// For tensors that all satisfy kernels_take(), of one dtype but for statistics, tables and logits, which are fp32, and
// targets. Work is issued to the device's current stream. Sums have an order that depends only on shapes, so the same
// tensors give the same bits on every device.
const DecoderOps& kernel_ops();

// Bytes of the sums that the gradient of RMSNorm's weight is added up from, for tensors [rows, dim] of this dtype.
int64_t kernel_norm_sums(int64_t rows, int64_t dim, at::ScalarType dtype);

}  // namespace annulus
