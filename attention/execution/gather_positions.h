// Results that lie over the ranks, put together on one of them. Used by the verbs that write whole tensors to a file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/plan/layout.h"
#include "comm/communicator.h"

namespace annulus {

// `part`: this rank's positions of a tensor along dimension `dim`, in the layout's order, on any device. Returns the
// whole of it on rank 0's CPU, undefined elsewhere. One peer after the other, so that rank 0 holds one part beside the
// whole. Collective; `host` carries CPU tensors.
at::Tensor gather_positions(Communicator& host, const at::Tensor& part, const Layout& layout, int64_t dim,
                            OpLabel label);

}  // namespace annulus
