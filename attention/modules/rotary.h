// Rotary position embedding (arXiv 2104.09864) by global position, in pairs (i, i + head_dim / 2). Used by
// MultiheadAttention and by the decoder (runtime/model/fused_ops.h has fused versions for fp32 on a CPU). Thread safe.
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

// Returns the angle per position of each pair: [head_dim / 2], CPU, fp64, or fp32 with spec.fp32.
at::Tensor rotary_frequencies(const RotarySpec& spec);

// Makes the table of positions (int64 [n]); angles are computed on the CPU, so positions on a GPU make the host wait.
// Cosine and sine are scaled by spec.attention_factor(). spec.head_dim must be even.
RotaryTable make_rotary_table(const at::Tensor& positions, const RotarySpec& spec, at::ScalarType dtype,
                              at::Device device);

// Returns the table of the concatenated `spans` plus offset from a cache of the process, shared by the layers and steps
// of a model; do not change it. Reads on the current stream are ordered after its upload without the host waiting. A
// captured CUDA graph does not own a table made before the capture, so code that replays the graph must hold the
// RotaryTable. Never run on a GPU.
RotaryTable rotary_table_at(const std::vector<Span>& spans, int64_t offset, const RotarySpec& spec,
                            at::ScalarType dtype, at::Device device);

// Rotates x [..., n, heads, head_dim], n as in the table. Differentiable in x.
at::Tensor rotate(const at::Tensor& x, const RotaryTable& table);

}  // namespace annulus
