// Checks, before keys and values are sent, that all ranks are in the same call of the same plan with tensors that fit
// it. This takes one small collective for each call (agree_together). If one rank refuses its own tensors or plan, all
// ranks raise the error. Internal to the executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "attention/execution/attention.h"

namespace annulus {

// `find` is called first; it looks up the plan (which checks a new request) and returns whether this rank asks for the
// plan's proof. The function returns on all ranks whether any of them asks. It raises what agree_together raises:
// Error(kMismatch) for differences between ranks, or the error of the ranks that failed. Collective.
bool agree_on_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
                      const std::function<bool()>& find);
// The same for the backward. Looks up forward.program if it is null and the pattern is not adaptive. Collective.
void agree_on_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       AttentionOutput& forward, const AttentionCall& call);

// The scale of the call, or 1 / sqrt(D) if it gives none.
double scale_of(const at::Tensor& q, const AttentionCall& call);

}  // namespace annulus
