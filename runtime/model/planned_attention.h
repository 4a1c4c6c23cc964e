// Attention over the ranks of a communicator (attention/execution/planned_call.h) as a layer of the model calls it.
// Used by runtime/training and runtime/inference. Thread safety is that of attention.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/execution/planned_call.h"
#include "runtime/model/decoder_layer.h"

namespace annulus {

// Collective, and so is the backward of what it returns. Raises the errors of attention_forward. `sinks` are given if
// the call has sinks.
Attended attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PlannedCall& call,
                  const at::Tensor& sinks);

}  // namespace annulus
