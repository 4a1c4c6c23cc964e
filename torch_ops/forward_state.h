// What a backward needs of its forward beside tensors (the program that ran, with the blocks it selected, and the keys
// and values held last), carried by a tensor: autograd and torch.compile pass it on as one of the saved tensors, and
// the state goes when the tensor goes. Used by the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>

#include "attention/execution/attention.h"

namespace annulus::torch_ops {

struct ForwardState {
  explicit ForwardState(AttentionCall c) : call(std::move(c)) {}
  const KeptCall call;
  std::shared_ptr<const Program> program;
  at::Tensor saved_k, saved_v;
};

// uint8 [1], a zero: the state goes with its storage, not with what can be read of it.
at::Tensor hold(std::shared_ptr<const ForwardState> state);

// The state of a tensor made by hold(), or of a view of it. Error(kUsage) for any other, copies among them.
// Thread-safe.
std::shared_ptr<const ForwardState> state_of(const at::Tensor& held);

}  // namespace annulus::torch_ops
