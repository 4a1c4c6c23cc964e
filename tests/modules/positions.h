// Which positions of a sequence a rank holds, for tests of modules that cut one.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "attention/plan/layout.h"

namespace annulus {

// In storage order: int64 [n].
inline at::Tensor positions_of(const Layout& layout, int rank) { return at::tensor(layout.positions(rank), at::kLong); }

}  // namespace annulus
