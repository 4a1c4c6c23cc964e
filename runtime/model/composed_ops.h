// The decoder's operations (decoder_ops.h) composed of LibTorch's operators, for every device and floating-point dtype:
// for bf16, fp16 and fp64 on CPUs, and for fp64 on GPUs, where they have never run. Used by fused_ops.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/charge.h"
#include "runtime/model/decoder_ops.h"

namespace annulus {

const DecoderOps& composed_ops();

// Returns the memory that RMSNorm and its gradient take on a CPU besides their results, with elements of `element`
// bytes in tensors and `wide` bytes in statistics.
std::vector<Charge> composed_norm_charges(int64_t rows, int64_t dim, int64_t element, int64_t wide);
// Returns the peak bytes of cross entropy with logits of `wide` bytes, these included.
int64_t composed_cross_entropy_bytes(int64_t logits, int64_t wide);

}  // namespace annulus
