// The backward of attention with a gradient of the log-sum-exp. Used by operators.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/execution/planned_call.h"

namespace annulus::torch_ops {

// The tensors of attention_backward.
struct BackwardTensors {
  at::Tensor dout, q, k, v;
  AttentionOutput forward;
};

// Returns tensors with which attention_backward computes the gradients of out and lse together: the given ones with a
// few extra columns each, to be dropped from its results. Pass it an explicit scale, which no longer follows from the
// head size. dlse [batch, heads, n], in the accumulator's dtype, is the gradient of lse; undefined on a rank without
// one if another rank has one, because all ranks must have the same head size.
//
// With score s, p = exp(s - lse) and delta = the sum of dout * out over the head size, the backward computes ds = p
// (dout . v - delta). As the derivative of lse by s is p, dlse adds p dlse to ds. A column that is 1 in v, dlse in dout
// and 0 in q, k and out does that without changing delta. In bf16 and fp16, dlse is split exactly over three columns,
// each with the rounding error of those before. Dropout would drop these columns as well, so there must be none.
BackwardTensors with_lse_gradient(const BackwardTensors& given, const at::Tensor& dlse);

}  // namespace annulus::torch_ops
