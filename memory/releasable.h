// A tensor whose memory is let go and taken again while the tensor, and its views, stay: weights that are there only
// while their layer runs. Used by model/parameters.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace annulus {

// Not thread-safe. On a GPU memory is taken and let go in the order of the current stream, as that of any tensor.
class ReleasableTensor {
 public:
  // [elements], not held.
  ReleasableTensor(int64_t elements, const at::TensorOptions& options);

  // The tensor. Nothing may be read from it or from its views, or written to them, while it is not held.
  const at::Tensor& tensor() const { return tensor_; }
  // Elements from `begin` on in this shape, a tensor of its own over the same memory: writing to tensor() is no change
  // of this one that autograd would see.
  at::Tensor alias(int64_t begin, at::IntArrayRef shape) const;

  // Takes memory, whose content is undefined. Nothing where it is held.
  void take();
  void release();

 private:
  at::Tensor tensor_;
  bool held_ = false;
};

}  // namespace annulus
