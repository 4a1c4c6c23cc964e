// The backward of attention if the log-sum-exp has a gradient, too. Used by operators.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/execution/planned_call.h"

namespace annulus::torch_ops {

// What attention_backward takes.
struct BackwardTensors {
  at::Tensor dout, q, k, v;
  AttentionOutput forward;
};

// Returns tensors of which attention_backward computes the gradients of out and lse together: the given ones with a few
// more columns each, to be cut off its results again. The scale must be given to it, as it no longer follows from the
// head size. dlse [batch, heads, n] in the accumulator's dtype is the gradient of lse, or undefined on a rank that has
// none while another rank has one, because all ranks must have the same head size.
//
// With score s, p = exp(s - lse) and delta = the sum of dout * out over the head size, the backward computes
// ds = p (dout . v - delta). As the derivative of lse by s is p, the gradient dlse adds p dlse to it. A column that is
// 1 in v, dlse in dout and 0 in q and k does that, provided that out has 0 there, so that delta stays what it is. In
// bf16 and fp16, dlse is divided among three columns, which lose nothing of it: each takes what the ones before could
// not represent. Dropout would drop these columns as well, so there must be none.
BackwardTensors with_lse_gradient(const BackwardTensors& given, const at::Tensor& dlse);

}  // namespace annulus::torch_ops
