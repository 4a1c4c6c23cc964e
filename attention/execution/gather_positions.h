// Gathers a tensor that is distributed over the ranks by a layout. Used by the subcommands that write whole tensors to
// a file
// (`attend`, `logits`).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/plan/layout.h"
#include "comm/communicator.h"

namespace annulus {

// `part` has this rank's positions of a tensor along dimension `dim`, in the layout's order, on any device. Returns the
// whole tensor on rank 0's CPU and an undefined tensor on other ranks. Rank 0 receives from one peer after the other,
// so it holds one part at a time beside the whole. Collective; `host` must be a communicator that carries CPU tensors.
at::Tensor gather_positions(Communicator& host, const at::Tensor& part, const Layout& layout, int64_t dim,
                            OpLabel label);

}  // namespace annulus
