// Lets ranks agree once, ahead, on all calls of attention that they are about to make, so that the calls themselves
// wait for no other rank before they begin. The trainer uses it for each step and each batch of validation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/execution/attention.h"

namespace annulus {

// What the ranks have agreed on: a set of calls with their tensors' dtype, head size and kind of device. Immutable.
class AgreedCalls;

// The properties of q, k and v that all ranks must share.
struct TensorTraits {
  at::ScalarType dtype = at::kFloat;
  int64_t head_dim = 0;
  c10::DeviceType device = at::kCPU;
};

// Collective over the calls' communicator, which must be the same for all: one agree_together, whatever the number of
// calls. Each rank looks up the plans of its calls; if they differ, or one rank cannot make a plan, every rank raises
// the error that a call would have raised, and nothing has been sent. If a rank asks for the proof of a plan, all plans
// that the calls have are proved now, where a call would have proved its own (adaptive patterns are still planned and
// proved by each call).
//
// Afterwards each call has `agreed` set, and its forward and backward make no agreement; nor is it compared whose
// backward a backward is. A rank whose call or tensors
// are not those that were agreed on raises Error(kPlan) alone, and the other ranks notice by their deadlines. The
// result is the same decision on all ranks: it does not depend on what a rank has in its caches.
void agree_ahead(const std::vector<AttentionCall*>& calls, const TensorTraits& tensors, OpLabel label);

}  // namespace annulus
