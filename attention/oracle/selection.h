// The blocks that an adaptive map selects, by the definition. Used by counts.cc; oracle.h has the interface.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/pattern/pattern.h"

namespace annulus::oracle_selection {

// 1 for each selected pair of blocks: [batch, heads, query blocks, key blocks]. `causal` is that of the map, a causal
// union around it included.
std::vector<uint8_t> selected_blocks(const BlocksSpec& spec, bool causal, const AttentionShape& shape,
                                     const at::Tensor& q, const at::Tensor& k);

}  // namespace annulus::oracle_selection
