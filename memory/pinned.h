// Pinned host memory for asynchronous copies between host and GPU: the inputs of a training step, and the results that
// the host reads back. On a CPU nothing is copied. Used by runtime/training/training.cc; upload.h is for small tables
// and lists. The copies to and from a GPU have never run.
//
// Thread safety: host_memory() and send() are thread safe; a Readback is not.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace annulus {

// Allocates an uninitialized contiguous host tensor as a source of copies to `device`, pinned if that is a GPU. It may
// be freed as soon as send() returns: LibTorch's host allocator keeps pinned memory until the copy is done.
at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType type, at::Device device);
// Copies `host` to `target`, of the same sizes and dtype, on the current stream. Does nothing if the target is on a
// CPU, which computes with the host tensor itself.
void send(const at::Tensor& host, const at::Tensor& target);

// Copies a tensor to the host asynchronously. Not thread safe.
class Readback {
 public:
  // Allocates pinned memory for tensors of these sizes and this dtype, if `device` is a GPU.
  Readback(at::IntArrayRef sizes, at::ScalarType type, at::Device device);

  // Starts the copy on the current stream of the values' device. Only one copy may be in flight.
  void start(const at::Tensor& values);
  // Returns whether the copy is complete. Raises the device's errors.
  bool ready() const { return !copied_ || copied_->query(); }
  // Waits for the copy and returns it, valid until the next start(). On a CPU returns the values themselves.
  const at::Tensor& wait();

 private:
  at::Tensor host_;  // pinned, or the values themselves
  std::optional<c10::Event> copied_;
};

}  // namespace annulus
