// Tensors whose memory comes and goes while the tensor and its views stay valid: weights that are held only while their
// layer runs (runtime/model/parameters.h), and tensors that get their memory when a message arrives
// (comm/communicator.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

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

// A tensor without memory. Views of it can be made; only its memory must not be read or written.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);
bool has_memory(const at::Tensor& tensor);
// Gives a tensor without memory this memory, in place of any that it had; `memory` must be as long as its storage.
void give_memory(const at::Tensor& tensor, c10::DataPtr memory);
// Gives a tensor without memory memory of its own, not initialised.
void give_own_memory(const at::Tensor& tensor);

}  // namespace annulus
