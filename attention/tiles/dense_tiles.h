// Computes tiles densely, block by block, on any device, with any band, dropout and non-finite values. The reference
// kernel consists of these two functions in fp64. The cpu kernel and the composed kernel use them for tiles that their
// fast paths do not support.
//
// Each intermediate tensor has at most kDenseRows x kDenseKeys scores for each query head of one batch row.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/tiles/kernel.h"

namespace annulus {

constexpr int64_t kDenseRows = 256;
constexpr int64_t kDenseKeys = 1024;

// Merges the results of the tile into out [B, n, H, D] and lse [B, H, n]. These and q have the dtype of the
// computation. Calls `poll`, if not empty, after each block.
void dense_tile_forward(const at::Tensor& q, const KeyBlock& keys, const Tile& tile, const KernelCall& call,
                        at::Tensor& out, at::Tensor& lse, const Poll& poll);

// The tensors of the call's queries: dout, q, out [B, n, H, D], in the dtype of the computation, and the merged lse [B,
// H, n], in that dtype or a narrower one.
struct DenseQueries {
  at::Tensor dout, q, out, lse;
};

// Adds the tile's gradients to dq and to `grads`. Returns the number of elements of the largest dK and dV result.
int64_t dense_tile_backward(const DenseQueries& queries, const KeyBlock& keys, const KeyBlock& grads, const Tile& tile,
                            const KernelCall& call, at::Tensor& dq, const Poll& poll);

// Returns the peak bytes of the forward and of the backward of a tile with these numbers of query rows, keys and query
// heads, with elements of `wide` bytes, dropout and a mask; an upper bound without the last two.
struct DenseBytes {
  int64_t forward, backward;
};
DenseBytes dense_bytes(int64_t queries, int64_t keys, int64_t heads, int64_t wide);

// Adds the charges of a kernel that computes tiles densely, in elements of `wide` bytes, if there is dropout, a soft
// cap or a mask.
inline void add_dense_charges(const CallSize& size, int64_t wide, std::vector<Charge>& charges) {
  if (!size.dropout && !size.softcap && !size.masked) return;
  const DenseBytes bytes = dense_bytes(size.queries, size.keys, size.heads, wide);
  charges.push_back({"a dense block", bytes.forward, When::kForward});
  charges.push_back({"a dense block", bytes.backward, When::kBackward});
}

}  // namespace annulus
