// Selects the blocks of an adaptive map by its definition. Used by counts.cc; oracle.h has the interface.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus::oracle_selection {

// Returns [batch, heads, query blocks, key blocks], row-major, with 1 for selected pairs. `causal`: the map, or a union
// that contains it, is causal.
std::vector<uint8_t> selected_blocks(const BlocksSpec& spec, bool causal, const AttentionShape& shape,
                                     const at::Tensor& q, const at::Tensor& k);

}  // namespace annulus::oracle_selection
