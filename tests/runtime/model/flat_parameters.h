// For tests that compare or change all parameters of a model.
#pragma once

#include <ATen/ops/cat.h>

#include <vector>

#include "runtime/model/parameters.h"

namespace annulus {

inline at::Tensor flat(const std::vector<NamedTensor>& views) {
  std::vector<at::Tensor> parts;
  for (const NamedTensor& view : views) parts.push_back(view.tensor.reshape({-1}));
  return at::cat(parts);
}

// Multiplies the weight matrices, so that attention and gates are far from linear.
inline void scale_matrices(Parameters& parameters, double factor) {
  for (const NamedTensor& view : parameters.value_views()) {
    if (view.tensor.dim() == 2) view.tensor.mul_(factor);
  }
}

// Copies values in the order of the lists; the dtypes may differ.
inline void copy_values(const Parameters& from, Parameters& to) {
  const std::vector<NamedTensor> source = from.value_views(), target = to.value_views();
  for (size_t i = 0; i < target.size(); ++i) target[i].tensor.copy_(source[i].tensor);
}

inline void add_to_values(Parameters& to, const at::Tensor& flat, double factor) {
  int64_t begin = 0;
  for (const NamedTensor& view : to.value_views()) {
    view.tensor.add_(flat.narrow(0, begin, view.tensor.numel()).view(view.tensor.sizes()), factor);
    begin += view.tensor.numel();
  }
}

inline void zero_gradients(Parameters& parameters) {
  for (const NamedTensor& view : parameters.gradient_views()) view.tensor.zero_();
}

}  // namespace annulus
