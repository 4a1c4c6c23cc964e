// Memory of the host that a GPU copies from and to by itself, while the host goes on: what a training step sends to its
// device and reads back from it. Where the device is a CPU nothing is copied. Used by training/training.cc; small
// tables and lists go by upload.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>

namespace annulus {

// Memory of the host from which `device` is sent to, contiguous: pinned where that is a GPU. Pinned memory may be freed
// as soon as send() has been called: LibTorch's host allocator keeps it until the copy is done.
at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType type, at::Device device);
// Brings what was written to `host`, of the target's sizes and dtype, to the target, in the order of the current
// stream; nothing where the target is on a CPU, which computes with what lies on the host.
void send(const at::Tensor& host, const at::Tensor& target);

// A tensor's values brought to the host, where they are read when they have come. Not thread-safe.
class Readback {
 public:
  // Takes pinned memory for tensors of these sizes and this dtype, where `device` is a GPU.
  Readback(at::IntArrayRef sizes, at::ScalarType type, at::Device device);

  // Begins: in the order of the current stream of the values' device. One at a time.
  void start(const at::Tensor& values);
  // Whether the values have come. Raises what the device raises.
  bool ready() const { return !copied_ || copied_->query(); }
  // Waits for them. Valid until the next start; on a CPU these are the values given, not a copy.
  const at::Tensor& wait();

 private:
  at::Tensor host_;  // pinned, or the values themselves
  std::optional<c10::Event> copied_;
};

}  // namespace annulus
