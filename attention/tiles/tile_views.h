// Makes tensor views for tiles. Used by kernels and by the executor. Only zero_if_fresh and pair_mask compute
// anything. Thread safe for different tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/plan/plan.h"
#include "attention/tiles/kernel_input.h"

namespace annulus {

// Returns block `number` of a buffer's tensors, each [rows of the RowSet, D], as views for kernels.
KeyBlock key_block(const at::Tensor& k, const at::Tensor& v, const RowSet& rows, int number);

// Query heads that one call can compute together, and the kv heads that they read: each run of query.count / kv.count
// query heads reads one kv head. head_groups divides `heads` into such groups; `group` is H / Hk.
struct HeadGroup {
  Span query, kv;
};
std::vector<HeadGroup> head_groups(const Span& heads, int64_t group);

// Returns the indices of the members of `part` within `whole`, to locate global batch rows or heads in a block. Raises
// Error(kInternal), which names `what`, if `whole` does not contain `part`.
Span indices_of(const Span& part, const Span& whole, const char* what);

// Returns a [b, h, m, D] view of a block's k, v, dk or dv, for global batch rows and kv heads, and rows of the block.
at::Tensor block_view(const at::Tensor& tensor, const KeyBlock& block, const Span& batch, const Span& heads,
                      const Span& rows);

// Returns a [b, h, n, D] view of a [B, rows, heads, D] tensor.
at::Tensor rows_view(const at::Tensor& tensor, const Span& batch, const Span& heads, const Span& rows);
// Returns a [b, h, n] view of a [B, H, rows] tensor.
at::Tensor lse_view(const at::Tensor& lse, const Span& batch, const Span& heads, const Span& rows);

// Returns the members of `whole` whose indices are in `part`.
inline Span members(const Span& whole, const Span& part) {
  return {whole.at(part.begin), whole.stride * part.stride, part.count};
}

// Returns a bool tensor [queries, keys] on the device of `like`, true within the tile's band and where its mask, if
// any, shows the pair. `queries` and `keys` are indices into the tile's rows and keys.
at::Tensor pair_mask(const Tile& tile, const MaskPlane* mask, const Span& queries, const Span& keys,
                     const at::Tensor& like);

// Zeroes fresh gradients, for kernels that add.
void zero_if_fresh(const KeyBlock& grads);

// Returns the dtype of accumulation of out, lse and gradients: fp64 for fp64 inputs, else fp32.
at::ScalarType accumulator_type(at::ScalarType input);

}  // namespace annulus
