// A tensor and its name: how parameters, optimizer state and checkpoints speak of tensors. Used throughout runtime/.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace annulus {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace annulus
