// Pinned host memory, from and to which a GPU copies asynchronously: for what a training step sends to its device and
// reads back from it. If the device is a CPU, nothing is copied. Used by runtime/training/training.cc; upload.h is for
// small tables and lists. The copies to and from a GPU have never run.
//
// Thread safety: host_memory() and send() are thread safe; a Readback is not.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace annulus {

// Allocates a contiguous host tensor, uninitialized, from which data are sent to `device`; it is pinned if that is a
// GPU. It may be freed as soon as send() has returned: LibTorch's host allocator keeps pinned memory until the copy is
// done.
at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType type, at::Device device);
// Copies `host` to `target`, which has the same sizes and dtype, in the order of the current stream. It does nothing if
// the target is on a CPU, which computes with the host tensor itself.
void send(const at::Tensor& host, const at::Tensor& target);

// Copies the values of a tensor to the host asynchronously. Not thread safe.
class Readback {
 public:
  // Allocates pinned memory for tensors of these sizes and this dtype, if `device` is a GPU.
  Readback(at::IntArrayRef sizes, at::ScalarType type, at::Device device);

  // Starts the copy, in the order of the current stream of the values' device. Only one copy may be under way.
  void start(const at::Tensor& values);
  // Whether the copy is complete. Raises the errors of the device.
  bool ready() const { return !copied_ || copied_->query(); }
  // Waits for the copy and returns the values, which are valid until the next start(). On a CPU these are the values
  // themselves, not a copy.
  const at::Tensor& wait();

 private:
  at::Tensor host_;  // pinned, or the values themselves
  std::optional<c10::Event> copied_;
};

}  // namespace annulus
