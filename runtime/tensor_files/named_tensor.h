// NamedTensor: a tensor and its name. Used by the model's parameters (runtime/model/parameters.h), files of tensors and
// whole_slices (runtime/run/tensor_slice.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace annulus {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace annulus
