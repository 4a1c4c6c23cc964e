// TensorSlice: a range of a tensor with its values. Checkpoints are written from slices and read into them
// (checkpoint.h); the weights of Hugging Face models are read into them (runtime/huggingface/weights.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "memory/tiers/tiered_tensors.h"
#include "runtime/tensor_files/named_tensor.h"

namespace annulus {

// Elements [begin, begin + elements().numel()) of a tensor, in row-major order. Whoever writes or fills slices uses
// elements(), part by part; `values` is for slices that are known to be tensors.
struct TensorSlice {
  std::string name;
  std::vector<int64_t> shape;  // of the whole tensor
  int64_t begin = 0;
  at::Tensor values;          // [n], contiguous, on any device, of the tensor's dtype; undefined if they lie in a tier
  PlacedVector in_tier = {};  // otherwise

  PlacedVector elements() const { return values.defined() ? PlacedVector{.tensor = values} : in_tier; }
};

// Returns each of these contiguous tensors as one slice that shares its storage.
inline std::vector<TensorSlice> whole_slices(const std::vector<NamedTensor>& tensors) {
  std::vector<TensorSlice> slices;
  for (const NamedTensor& t : tensors) slices.push_back({t.name, t.tensor.sizes().vec(), 0, t.tensor.view({-1})});
  return slices;
}

}  // namespace annulus
