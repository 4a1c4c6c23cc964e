// Before anything travels, all ranks must be in the same call of the same plan, with tensors that fit it: one small
// collective a call (agree_together). If one rank must refuse its own tensors or plan, all do. Internal to the
// executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "attention/execution/attention.h"

namespace annulus {

// `find` looks the plan up first (it checks the request when it is new) and says whether this rank asks for the plan's
// proof. Returns, alike on all ranks, whether any of them does. Raises on all of them what
// agree_together does.
bool agree_on_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
                      const std::function<bool()>& find);
// Looks up forward.program where it is not given.
void agree_on_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       AttentionOutput& forward, const AttentionCall& call);

// The call's, or 1 / sqrt(D).
double scale_of(const at::Tensor& q, const AttentionCall& call);

}  // namespace annulus
