// Merging partial attention results: running out and lse of some rows, and what more sets of keys give them.
// docs/attention.md, "Merging partial results" (FlashAttention 2, arXiv 2307.08691, section 3.1). Used by kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

namespace annulus {

// What one set of keys gives some consecutive rows.
struct MergePart {
  at::Tensor out;     // [b, h, n', D], of the accumulator's dtype or of a smaller one, alike for all parts of a call
  at::Tensor lse;     // [b, h, n'] in the accumulator's dtype; -inf: no key, out is ignored
  int64_t first = 0;  // row of the whole that its row 0 is
};

constexpr size_t kMostParts = 4;

// out and lse become those of all parts' keys, and of what `before_out` and `before_lse` hold where they are given: out
// and lse themselves, say. Rows that no part reaches and nothing was held for have out 0 and lse -inf. One pass over
// memory for up to kMostParts parts.
//   out [b, h, n, D] of the accumulator's or the parts' dtype; lse [b, h, n], before_out, before_lse likewise, all of
//   the accumulator's dtype. Any strides, the last dimension of out, before_out and parts contiguous.
// Where no lse is given at all, out becomes the plain sum: gradients. Where `index` (int64 [n'], contiguous, on the
// same device) is given, there is one part, whose row i belongs to row index[i], no row twice, and other rows stay as
// they are. On a GPU: on the current stream.
void merge_parts(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                 const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index = {});

// One part into what out and lse hold.
void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index = {});

}  // namespace annulus
