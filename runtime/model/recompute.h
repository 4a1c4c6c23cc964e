// Activation recomputation (checkpointing) in the backward. Used by runtime/model/model.cc.
// Thread safety: a function without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace annulus {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// Returns f(inputs), with the same gradients, but saves only the inputs: f runs again in the backward. Inputs must be
// floating-point tensors or undefined. Other tensors that f uses must not change until then, and get no gradient.
std::vector<at::Tensor> recomputed(const TensorFunction& f, const std::vector<at::Tensor>& inputs);

}  // namespace annulus
