// Tensors whose memory comes from the pool of the process, and returns to it when the last of them is freed. Used by
// the executor of attention, communicators, kernels, the state of training, and tiers. Thread safe.
//
// On a CPU alone: on a GPU LibTorch's caching allocator keeps freed memory, orders its reuse by streams and is captured
// by CUDA graphs, so these functions leave tensors of GPUs to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "memory/pool/pool.h"

namespace annulus {

// Returns an uninitialized contiguous tensor, like at::empty. Raises Error(kResource) like Pool::get.
at::Tensor pool_tensor(at::IntArrayRef sizes, const at::TensorOptions& options, PoolPurpose purpose);

// Returns an allocator of CPU memory of this purpose, which lasts as long as the process; null for other devices, where
// a caller takes the device's own. For tensor_without_memory (memory/releasable.h).
c10::Allocator* pool_allocator(PoolPurpose purpose, at::Device device = at::kCPU);

}  // namespace annulus
