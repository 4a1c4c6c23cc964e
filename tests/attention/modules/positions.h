// For tests of modules on parts of a sequence: the positions that a rank holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "attention/plan/layout.h"

namespace annulus {

// Returns the positions as int64 [n], in storage order.
inline at::Tensor positions_of(const Layout& layout, int rank) { return at::tensor(layout.positions(rank), at::kLong); }

}  // namespace annulus
