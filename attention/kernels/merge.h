// Merging partial attention results: running out and lse of some rows, and what one more set of keys gives them.
// docs/attention.md, "Merging partial results" (FlashAttention 2, arXiv 2307.08691, section 3.1). Used by kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

// out, part_out: [b, h, n, D]; lse, part_lse: [b, h, n]; all of the accumulator's dtype, any strides, out's last
// dimension contiguous. out and lse become those of both sets of keys. A row with lse = -inf holds no key (its out is
// ignored).
void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out,
                   const at::Tensor& part_lse);

}  // namespace annulus
