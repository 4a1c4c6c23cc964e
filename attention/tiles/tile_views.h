// From a tile to tensor views: what every kernel does before it computes. Used by kernels, and by whoever runs
// programs: the executor and benchmarks/simulated_ring.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/plan/plan.h"
#include "attention/tiles/kernel_input.h"

namespace annulus {

// Block `number` of a buffer's tensors [rows of the RowSet, D], as kernels take it.
KeyBlock key_block(const at::Tensor& k, const at::Tensor& v, const RowSet& rows, int number);

// Query heads that one call can take together with the kv heads they read: `query.count` a multiple of `kv.count`, in
// groups of equal size.
struct HeadGroup {
  Span query, kv;
};
std::vector<HeadGroup> head_groups(const Span& heads, int64_t group);

// The indices of `part` within `whole`, which holds it: where global batch rows or heads lie in a block. Raises
// Error(kInternal) naming `what` where it does not.
Span indices_of(const Span& part, const Span& whole, const char* what);

// [b, h, m, D] view of a block's k, v, dk or dv: global batch rows and kv heads, and rows of the block.
at::Tensor block_view(const at::Tensor& tensor, const KeyBlock& block, const Span& batch, const Span& heads,
                      const Span& rows);

// [b, h, n, D] view of a [B, rows, heads, D] tensor.
at::Tensor rows_view(const at::Tensor& tensor, const Span& batch, const Span& heads, const Span& rows);
// [b, h, n] view of a [B, H, rows] tensor.
at::Tensor lse_view(const at::Tensor& lse, const Span& batch, const Span& heads, const Span& rows);

// The members of `part` (indices) among the members of `whole`.
inline Span members(const Span& whole, const Span& part) {
  return {whole.at(part.begin), whole.stride * part.stride, part.count};
}

// bool [queries, keys]: which pairs of the tile's rectangle lie within its band.
at::Tensor band_mask(const Tile& tile, const Span& queries, const Span& keys, const at::Tensor& like);

// Sets gradients that hold nothing yet to zero, for kernels that add.
void zero_if_fresh(const KeyBlock& grads);

// fp64 for fp64, else fp32: what out, lse and gradients accumulate in.
at::ScalarType accumulator_type(at::ScalarType input);

}  // namespace annulus
