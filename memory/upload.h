// Copies small host tensors (row numbers, tables, lengths) to the device of a call. Used by the composed kernel, the
// executor, the selection of blocks, dropout and the rotary embedding. The copies to a GPU have never run.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <initializer_list>
#include <optional>

namespace annulus {

// The content of a CPU tensor on `device`: on a CPU the tensor itself, on a GPU a copy in the order of the current
// stream. The host does not wait for the device, and the tensor may be changed or freed at once: the copy is made from
// pinned memory, which LibTorch's host allocator keeps until the stream has passed the copy (while a CUDA graph is
// captured, as long as the graph exists). Thread safe.
at::Tensor upload(const at::Tensor& host, at::Device device);

// Orders reads of tensors that were uploaded once and are kept. They may be read on another stream than the one that
// uploaded them.
class KeptUploads {
 public:
  // Call it once, after the last upload() to `device`, on the same thread and stream.
  void mark(at::Device device);
  // Whether the uploads were recorded into a CUDA graph. The graph then fills the tensors whenever it is replayed, so
  // they are only valid for that graph.
  bool captured() const { return captured_; }
  // Call it before the tensors are read on the current stream (undefined tensors are skipped). It orders the stream
  // after the mark, and keeps their memory until the stream has passed, even if the tensors are freed meanwhile. The
  // host does not wait. Once the uploads are known to be complete, the event is no longer queried. While a CUDA graph
  // is captured it must not be queried; the code that captures has waited for the device before. Thread safe after
  // mark().
  void read(std::initializer_list<at::Tensor> tensors) const;

 private:
  mutable std::optional<c10::Event> uploaded_;  // empty on a CPU, and if the uploads were captured
  mutable std::atomic<bool> there_ = false;
  bool captured_ = false;
};

}  // namespace annulus
