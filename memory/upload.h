// Small host tensors (row numbers, tables, lengths) brought to the device of a call. Used by the kernels, by the
// executor, by the selection of blocks and by the rotary embedding.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <atomic>
#include <initializer_list>
#include <optional>

namespace annulus {

// The content of a CPU tensor on `device`: on a CPU the tensor itself, on a GPU a copy in the order of the current
// stream. The host does not wait for the device, and the tensor may be changed or freed at once: the copy is made from
// pinned memory that LibTorch's host allocator keeps until the stream has passed (while a CUDA graph is captured, as
// long as the graph lives).
at::Tensor upload(const at::Tensor& host, at::Device device);

// For what is uploaded once and kept: whoever reads it later may do so on another stream than the one that uploads.
class KeptUploads {
 public:
  // Called once, after the last upload() to `device`, by the thread and on the stream that made it.
  void mark(at::Device device);
  // The uploads were recorded into a CUDA graph, which fills the tensors when it is replayed: they are the graph's.
  bool captured() const { return captured_; }
  // Before the tensors (undefined ones are skipped) are read on the current stream: orders it after the mark, and has
  // their memory kept until it has passed even if the tensors are let go meanwhile. The host does not wait. Once the
  // uploads are seen to be through, no event is asked any more. While a CUDA graph is captured none may be: whoever
  // captures has waited for the device before. Any number of threads.
  void read(std::initializer_list<at::Tensor> tensors) const;

 private:
  mutable std::optional<c10::Event> uploaded_;  // none: on a CPU
  mutable std::atomic<bool> there_ = false;
  bool captured_ = false;
};

}  // namespace annulus
