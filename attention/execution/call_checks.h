// Before anything travels, all ranks must be in the same call of the same plan, with tensors that fit it: one small
// collective a call. What a rank finds wrong with its own tensors or plan is part of what is compared: if one rank must
// refuse, all do. Internal to the executor.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>

#include "attention/execution/attention.h"

namespace annulus {

// `find` looks the plan up first (it checks the request when it is new) and says whether this rank asks for the plan's
// proof. Returns, alike on all ranks, whether any of them does. Raises Error(kMismatch) or Error(kPlan) on all of them.
bool agree_on_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionCall& call,
                      const std::function<bool()>& find);
void agree_on_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const AttentionOutput& forward, const AttentionCall& call);

// The call's, or 1 / sqrt(D).
double scale_of(const at::Tensor& q, const AttentionCall& call);

// Short enough to travel before every call: lists of documents and of slices may be long.
std::string shortened_for_agreement(const std::string& text);

}  // namespace annulus
