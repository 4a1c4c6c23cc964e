// Who computes the decoder's operations (decoder_ops.h), and who is chosen for given tensors. Used by fused_ops.cc and
// decoder_layer.cc. Thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "memory/charge.h"
#include "runtime/model/decoder_ops.h"

namespace annulus {

// Returns kernels for GPUs, loops for fp32 on a CPU, and LibTorch's operators otherwise. The first tensor must be
// defined; others may be undefined and then do not count.
const DecoderOps& ops_for(std::initializer_list<at::Tensor> tensors);

// The same for rotary_split and its backward. The tables are in the accumulator's dtype.
const DecoderOps& ops_for_rotation(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine);

// ---- loop_ops.cc: the fp32 loops of fused_loops.h, multithreaded. Results do not depend on the number of threads.

// Returns whether the loops support this tensor: fp32, on a CPU, contiguous, not empty.
bool loops_take(const at::Tensor& tensor);

// Returns the operations, for tensors that all satisfy loops_take().
const DecoderOps& loop_ops();

// ---- gpu_ops.cc: fused kernels for GPUs (runtime/model/gpu/), for fp32, bf16 and fp16. They have never run on a GPU;
// tests run them on a CPU.

// Returns whether the kernels support this tensor: one of their dtypes, on a device with a launcher
// (runtime/model/gpu/launcher.h), contiguous, not empty, no dimension of 2^30 or more after the first.
bool kernels_take(const at::Tensor& tensor);

// Returns the operations, for tensors that all satisfy kernels_take() and have one dtype, except targets, and
// statistics, tables and logits, which are fp32. Work goes to the device's current stream. The order of sums depends
// only on shapes, so the same tensors give the same bits on every device.
const DecoderOps& kernel_ops();

// Returns the bytes of the partial sums of RMSNorm's weight gradient, for tensors [rows, dim] of this dtype.
int64_t kernel_norm_sums(int64_t rows, int64_t dim, at::ScalarType dtype);

// ---- composed_ops.cc: LibTorch's operators, for every device and floating-point dtype: for bf16, fp16 and fp64 on
// CPUs, and for fp64 on GPUs, where they have never run.

const DecoderOps& composed_ops();

// Returns the memory that RMSNorm and its gradient take on a CPU besides their results, with elements of `element`
// bytes in tensors and `wide` bytes in statistics.
std::vector<Charge> composed_norm_charges(int64_t rows, int64_t dim, int64_t element, int64_t wide);
// Returns the peak bytes of cross entropy with logits of `wide` bytes, these included.
int64_t composed_cross_entropy_bytes(int64_t logits, int64_t wide);

}  // namespace annulus
