// Computes, before there are tensors, what attention() will hold (memory/charge.h). Used by the memory plan of a
// training step (runtime/training/memory_plan.cc).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "attention/plan/plan.h"
#include "attention/tiles/kernel.h"
#include "memory/charge.h"

namespace annulus {

struct CallTraits {
  int64_t head_dim;
  at::ScalarType type;
  bool gpu;
  bool dropout;                         // whether some pairs are dropped
  bool softcap = false, sinks = false;  // whether scores are capped, and softmaxes have sinks
};

// The part "attention" of a step: the charges in bytes of a call of this rank's program with `kernel`, without q, k, v
// and the gradient of the output, which are the caller's. `program` is null for requests with adaptive block maps,
// which get a program at each call; travelling blocks and blocks kept for the backward are then left out.
inline constexpr std::string_view kAttentionPart = "attention";
Part attention_charges(const PlanRequest& request, const Program* program, int rank, const CallTraits& call,
                       const Kernel& kernel);

}  // namespace annulus
