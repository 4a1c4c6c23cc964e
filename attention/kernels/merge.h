// Merging partial attention results: running out and lse of some rows, and what one more set of keys gives them.
// docs/attention.md, "Merging partial results" (FlashAttention 2, arXiv 2307.08691, section 3.1). Used by kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

// out, part_out: [b, h, n, D]; lse, part_lse: [b, h, n]; any strides, the last dimension of out and part_out
// contiguous. out, lse and part_lse are of the accumulator's dtype; part_out of that or of a smaller one. out and lse
// become those of both sets of keys. A row with lse = -inf holds no key (its out is ignored). Where `index` (int64 [n],
// contiguous, on the same device) is given, row i of the part belongs to row index[i] of out and lse, which may have
// more rows; no row twice. On a GPU: on the current stream.
void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index = {});

}  // namespace annulus
