// What attention() holds (memory/charge.h), before there are tensors: for the memory plan of a training step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/kernels/kernel.h"
#include "attention/plan/plan.h"
#include "memory/charge.h"

namespace annulus {

// The part "attention" of a step: a call of this rank's program with `head_dim` elements a row of dtype `type`. Block
// maps that are selected at run time make a program of their own at each call: of such a request `program` is null, and
// what travels, what is kept of it, and the selection are left out. `kernel` is the one that will compute it.
inline constexpr std::string_view kAttentionPart = "attention";
Part attention_charges(const PlanRequest& request, const Program* program, int rank, int64_t head_dim,
                       at::ScalarType type, const Kernel& kernel);

}  // namespace annulus
