// The decoder's operations (decoder_ops.h) by the fp32 loops of fused_loops.h, multithreaded. Used by fused_ops.cc.
// Results do not depend on the number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/model/decoder_ops.h"

namespace annulus {

// Returns whether the loops support this tensor: fp32, on a CPU, contiguous, not empty.
bool loops_take(const at::Tensor& tensor);

// Returns the operations, for tensors that all satisfy loops_take().
const DecoderOps& loop_ops();

}  // namespace annulus
