// Keeping less for the backward: parts of the model that are computed again there. Used by model.cc.
// Thread safety: a function without state.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace annulus {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// f(inputs), and the same gradients: of everything in between only the inputs are kept, f runs again in the backward.
// Inputs are floating point, or undefined. What else f uses must stay as it is until then, and needs no gradient.
std::vector<at::Tensor> recomputed(const TensorFunction& f, const std::vector<at::Tensor>& inputs);

}  // namespace annulus
