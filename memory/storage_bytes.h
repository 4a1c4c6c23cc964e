// Adds up the bytes of tensors' memory, each storage once, whichever of its views are given. Used by what tells how
// much memory it holds: the layers of the model and the state of training.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_set>

namespace annulus {

// Not thread safe. The memory must stay allocated as long as more is added.
class StorageBytes {
 public:
  // Undefined tensors and those without memory (memory/releasable.h) count nothing.
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const void* const memory = tensor.storage().data();
    if (memory != nullptr && seen_.insert(memory).second) bytes_ += static_cast<int64_t>(tensor.storage().nbytes());
  }
  void clear() { seen_.clear(), bytes_ = 0; }
  int64_t bytes() const { return bytes_; }

 private:
  std::unordered_set<const void*> seen_;
  int64_t bytes_ = 0;
};

}  // namespace annulus
