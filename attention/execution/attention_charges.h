// What attention() holds (memory/charge.h), before there are tensors: for the memory plan of a training step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/kernels/kernel.h"
#include "attention/plan/plan.h"
#include "memory/charge.h"

namespace annulus {

struct CallTraits {
  int64_t head_dim;
  at::ScalarType type;
  bool gpu;
  bool dropout;  // some pairs are dropped
};

// The part "attention" of a step: a call of this rank's program by `kernel`. Block maps that are selected at run time
// make a program of their own at each call: of such a request `program` is null, and what travels and what is kept of
// it are left out.
inline constexpr std::string_view kAttentionPart = "attention";
Part attention_charges(const PlanRequest& request, const Program* program, int rank, const CallTraits& call,
                       const Kernel& kernel);

}  // namespace annulus
