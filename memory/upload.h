// Copies small host tensors (row numbers, tables, lengths) to the device of a call. Used by the composed kernel, the
// executor, the selection of blocks, dropout and the rotary embedding. The copies to a GPU have never run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <initializer_list>
#include <optional>

namespace annulus {

// Copies a CPU tensor to `device` on the current stream; on a CPU returns the tensor itself. The host does not wait for
// the device, and `host` may be changed or freed at once: the copy is made from pinned memory, which LibTorch's host
// allocator keeps until the stream has passed the copy (while a CUDA graph is captured, as long as the graph exists).
// Thread safe.
at::Tensor upload(const at::Tensor& host, at::Device device);

// Synchronizes reads of cached uploads, possibly on another stream, with the stream that uploaded them.
class KeptUploads {
 public:
  // Call it once, after the last upload() to `device`, on the same thread and stream.
  void mark(at::Device device);
  // Returns whether the uploads were captured into a CUDA graph. Its replay fills the tensors, so only that graph may
  // read them.
  bool captured() const { return captured_; }
  // Call it before the tensors are read on the current stream (undefined tensors are skipped). It makes the stream wait
  // for mark(), and keeps the tensors' memory until the stream has passed, even if they are freed meanwhile. The host
  // does not wait. The event is not queried once the uploads are known to be complete, nor while a CUDA graph is
  // captured, where queries are illegal; the code that captures has synchronized the device before. Thread safe after
  // mark().
  void read(std::initializer_list<at::Tensor> tensors) const;

 private:
  mutable std::optional<c10::Event> uploaded_;  // empty on a CPU, and if the uploads were captured
  mutable std::atomic<bool> there_ = false;
  bool captured_ = false;
};

}  // namespace annulus
