// Merges partial attention results: the running out and lse of some rows with those of further sets of keys.
// docs/explanation/attention.md, "Merging partial results", has the formulas (FlashAttention 2, arXiv 2307.08691,
// section 3.1). Used by the composed kernel and dense_tiles.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <utility>

#include "attention/pattern/span.h"

namespace annulus {

// The attention over one set of keys, for some batch rows, heads and rows.
struct MergePart {
  at::Tensor out;           // [b', h', n', D], in the accumulator's dtype or a narrower one, the same for all parts
  at::Tensor lse;           // [b', h', n'] in the accumulator's dtype; -inf: no key, out is ignored
  Span batch, heads, rows;  // b', h' and n' of the whole

  MergePart(at::Tensor values, at::Tensor their_lse, Span batch_rows, Span of_heads, Span of_rows)
      : out(std::move(values)), lse(std::move(their_lse)), batch(batch_rows), heads(of_heads), rows(of_rows) {}
  // A part with all batch rows and heads, and consecutive rows from `first` on.
  MergePart(at::Tensor values, at::Tensor their_lse, int64_t first)
      : MergePart(values, std::move(their_lse), {0, 1, values.size(0)}, {0, 1, values.size(1)},
                  {first, 1, values.size(2)}) {}
};

constexpr size_t kMostParts = 8;

// Sets out and lse to the merged result of all parts and, if given, of `before_out` and `before_lse`, which may alias
// out and lse, in one pass over memory. A row in no part and without a `before` gets out 0 and lse -inf. Values are
// added in the order of the parts, `before` last.
//   out is [b, h, n, D] in the accumulator's or the parts' dtype. lse is [b, h, n]; before_out and before_lse have the
//   same shapes; all three have the accumulator's dtype. The last dimension of out, before_out and the parts must be
//   contiguous; the other strides are arbitrary.
// Without any lse, out is the plain sum, as for gradients. With `index` (int64 [n'], contiguous, distinct values, on
// the same device) there must be one part, of all batch rows and heads; its row i belongs to row index[i], and other
// rows stay unchanged. On a GPU this runs on the current stream. Raises Error(kInternal) for more than kMostParts
// parts.
void merge_parts(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& before_out,
                 const at::Tensor& before_lse, std::span<const MergePart> parts, const at::Tensor& index = {});

// Merges one part into out and lse.
void merge_partial(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse,
                   const at::Tensor& index = {});

}  // namespace annulus
