// Tensors whose memory can be released and allocated again while the tensor and its views stay valid: weights that
// exist only while their layer runs (runtime/model/parameters.h), and tensors that get their memory when a message
// arrives (comm/communicator.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>

namespace annulus {

// Not thread safe. On a GPU, memory is allocated and released in stream order, as for any tensor (never run on
// hardware).
class ReleasableTensor {
 public:
  // Makes a tensor of shape [elements], without memory. `allocator` as for tensor_without_memory().
  ReleasableTensor(int64_t elements, const at::TensorOptions& options, c10::Allocator* allocator = nullptr);

  // Returns the tensor. Do not read or write it or its views while it has no memory.
  const at::Tensor& tensor() const { return tensor_; }
  // Returns the elements from `begin` on in this shape, as a separate tensor over the same memory: for autograd, a
  // write to tensor() does not change the version of the alias.
  at::Tensor alias(int64_t begin, at::IntArrayRef shape) const;

  // Allocates uninitialized memory. Does nothing if the tensor has memory.
  void take();
  // Releases the memory. Does nothing if the tensor has none.
  void release();

 private:
  at::Tensor tensor_;
  bool held_ = false;
};

// Returns a tensor without memory, of which views may be made. Its elements must not be read or written. Its own memory
// comes from `allocator` (memory/pool/pool_tensor.h), or from that of its device if this is null.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options,
                                 c10::Allocator* allocator = nullptr);
bool has_memory(const at::Tensor& tensor);
// Sets the memory of such a tensor, in place of any that it had; `memory` must have the size of its storage.
void give_memory(const at::Tensor& tensor, c10::DataPtr memory);
// Allocates uninitialized memory for such a tensor.
void give_own_memory(const at::Tensor& tensor);

}  // namespace annulus
