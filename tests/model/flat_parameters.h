// A model's parameters as one vector, for tests that compare or change all of them.
#pragma once

#include <ATen/ops/cat.h>

#include <vector>

#include "model/parameters.h"

namespace annulus {

inline at::Tensor flat(const std::vector<NamedTensor>& views) {
  std::vector<at::Tensor> parts;
  for (const NamedTensor& view : views) parts.push_back(view.tensor.reshape({-1}));
  return at::cat(parts);
}

// Larger weights than the initial ones, so that attention and gates are far from linear.
inline void scale_matrices(Parameters& parameters, double factor) {
  for (const NamedTensor& view : parameters.value_views()) {
    if (view.tensor.dim() == 2) view.tensor.mul_(factor);
  }
}

// In the order of the list, whatever the dtypes.
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
