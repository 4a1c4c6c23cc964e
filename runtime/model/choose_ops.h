// Chooses who computes the decoder's operations (decoder_ops.h) for given tensors: kernels for GPUs, loops for fp32 on
// a CPU, and LibTorch's operators otherwise. Used by fused_ops.cc and decoder_layer.cc. Thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "runtime/model/decoder_ops.h"

namespace annulus {

// The first tensor must be defined; others may be undefined and then do not count.
const DecoderOps& ops_for(std::initializer_list<at::Tensor> tensors);

// The same for rotary_split and its backward. The tables are in the accumulator's dtype.
const DecoderOps& ops_for_rotation(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine);

}  // namespace annulus
