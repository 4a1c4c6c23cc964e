// A tensor and its name: how parameters, optimizer state and checkpoints speak of tensors. Used by the model, the
// optimizer and all files of tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace annulus {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace annulus
