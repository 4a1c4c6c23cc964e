// Rotary embedding (arXiv 2104.09864) by global position, in pairs (i, i + head_dim / 2). Used by MultiheadAttention
// and by the decoder (runtime/model/fused_ops.h, which has single passes for fp32 on a CPU). Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/modules/rotary_spec.h"
#include "attention/pattern/span.h"
#include "memory/byte_cache.h"

namespace annulus {

struct RotaryTable {
  at::Tensor cosine;  // [n, head_dim / 2]
  at::Tensor sine;
};

// The angle per position of each pair: [head_dim / 2], CPU, fp64, or fp32 with spec.fp32.
at::Tensor rotary_frequencies(const RotarySpec& spec);

// positions: int64 [n], on the CPU unless the host may wait for them, because angles are computed on the CPU. Cosine
// and sine are scaled by spec.attention_factor(). spec.head_dim must be even.
RotaryTable make_rotary_table(const at::Tensor& positions, const RotarySpec& spec, at::ScalarType dtype,
                              at::Device device);

// The same for the positions of `spans`, one span after the other, plus offset. It comes from a cache of the process,
// so that the layers and steps of a model share one table, as do queries and keys at the same positions; it must not be
// changed. Reads on the current stream are ordered after its upload without the host waiting. A CUDA graph may be
// recorded with a table that was made before, but does not own it: whoever replays the graph must hold the RotaryTable.
// It has never run on a GPU.
RotaryTable rotary_table_at(const std::vector<Span>& spans, int64_t offset, const RotarySpec& spec,
                            at::ScalarType dtype, at::Device device);

// x [..., n, heads, head_dim], n as in the table. Differentiable in x.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table);

}  // namespace annulus
