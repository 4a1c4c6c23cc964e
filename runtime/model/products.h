// The decoder's matrix products. Large fp32 products on a CPU call oneDNN, which LibTorch contains but uses only for
// bf16 and fp16: on AMD's processors it is faster than MKL, and it uses the same instructions on all vendors'
// processors. Others call LibTorch's product. Used by model.cc, decoder_layer.cc and fused_ops.cc. Thread safety: free
// functions without state.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

// Returns x weight^T + bias [rows, out], with x [rows, in], weight [out, in] and bias [out] or undefined.
// Differentiable in all three.
at::Tensor linear_layer(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// Returns the product of a [m, k] and b [k, n], which may be strided. Not differentiable, like the functions below.
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

// Overwrites `out` [m, n] with the product. oneDNN computes it in a temporary tensor, which is copied.
void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b);

// Returns the product, with fp32 accumulation and result if a and b are bf16 or fp16.
at::Tensor wide_product(const at::Tensor& a, const at::Tensor& b);

// Adds wide_product(a, b) to `sum`, which has its dtype and is contiguous: on a GPU in place, otherwise through a
// temporary tensor.
void add_wide_product(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b);

}  // namespace annulus
