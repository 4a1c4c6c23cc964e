// The decoder's matrix products. On a CPU in fp32 a large product is computed by oneDNN, which LibTorch contains but
// uses for bf16 and fp16 alone: on AMD's processors it is faster than MKL, and it has the same instructions on
// processors of all makers. Everything else is LibTorch's own product. Used by model.cc and fused_ops.cc. Thread
// safety: free functions without state.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

// x weight^T + bias, with x [rows, in], weight [out, in] and bias [out], which may be undefined -> [rows, out].
// Differentiable in all three.
at::Tensor linear_layer(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// The product of a [m, k] and b [k, n], which may be strided. Records no gradient.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

// Overwrites `out` [m, n] with it. oneDNN computes it in a tensor of its own, which is copied.
void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

// The same, where sums and result are fp32 if a and b are bf16 or fp16.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b);

// Adds that to `sum`, which has its dtype and is contiguous. On a GPU the product adds to the memory of `sum`;
// otherwise it is a tensor of its own first.
void add_wide_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

}  // namespace annulus
