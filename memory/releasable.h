// A tensor whose memory is released and allocated again while the tensor and its views stay valid: for weights that are
// held only while their layer runs. Used by model/parameters.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

// Not thread safe. On a GPU, memory is allocated and released in the order of the current stream, as for any tensor (no
// hardware has run that).
class ReleasableTensor {
 public:
  // A tensor of shape [elements], without memory.
  ReleasableTensor(int64_t elements, const at::TensorOptions& options);

  // The tensor. Do not read or write it or its views while it has no memory.
  const at::Tensor& tensor() const { return tensor_; }
  // The elements from `begin` on in this shape, as a separate tensor over the same memory: autograd does not regard
  // writing to tensor() as a change of the alias.
  at::Tensor alias(int64_t begin, at::IntArrayRef shape) const;

  // Allocates the memory, whose content is undefined. Does nothing if the tensor has memory.
  void take();
  // Releases the memory. Does nothing if the tensor has none.
  void release();

 private:
  at::Tensor tensor_;
  bool held_ = false;
};

}  // namespace annulus
