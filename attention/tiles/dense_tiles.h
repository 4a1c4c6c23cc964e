// Tiles computed densely, block by block: any band, dropout, values that are not finite, any device. The reference
// kernel is these two functions in fp64; the cpu kernel takes them for what its fast path cannot do, and
// so does the composed kernel.
//
// Memory: each intermediate holds at most kDenseRows x kDenseKeys scores for each query head of one batch row.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/tiles/kernel_input.h"

namespace annulus {

constexpr int64_t kDenseRows = 256;
constexpr int64_t kDenseKeys = 1024;

// Merges the tile into out [B, n, H, D] and lse [B, H, n]. They and q are of the dtype to compute in.
void dense_tile_forward(const at::Tensor& q, const KeyBlock& keys, const Tile& tile, const KernelCall& call,
                        at::Tensor& out, at::Tensor& lse, const Poll& poll);

// Of the call's queries: dout, q, out [B, n, H, D] and the merged lse [B, H, n], in the dtype to compute in.
struct DenseQueries {
  at::Tensor dout, q, out, lse;
};

// Adds the tile's gradients to dq and to `grads`; returns the elements of the largest dK and dV result.
int64_t dense_tile_backward(const DenseQueries& queries, const KeyBlock& keys, const KeyBlock& grads, const Tile& tile,
                            const KernelCall& call, at::Tensor& dq, const Poll& poll);

// What they take at once for a tile of so many query rows, keys and query heads, computed in elements of `wide` bytes:
// bytes in the forward and in the backward, where dropout or a mask is applied. Without one it is less.
struct DenseBytes {
  int64_t forward, backward;
};
DenseBytes dense_bytes(int64_t queries, int64_t keys, int64_t heads, int64_t wide);

}  // namespace annulus
