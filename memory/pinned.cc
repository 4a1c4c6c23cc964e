// See pinned.h.
#include "memory/pinned.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace annulus {
namespace {

at::Tensor empty_pinned(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions(type).pinned_memory(true));
}

}  // namespace

at::Tensor host_memory(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  return device.is_cpu() ? at::empty(sizes, type) : empty_pinned(sizes, type);
}

void send(const at::Tensor& host, const at::Tensor& target) {
  if (!target.is_cpu()) target.copy_(host, /*non_blocking=*/true);
}

Readback::Readback(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  if (!device.is_cpu()) host_ = empty_pinned(sizes, type);
}

void Readback::start(const at::Tensor& values) {
  if (values.is_cpu()) {
    host_ = values;
    return;
  }
  host_.copy_(values, /*non_blocking=*/true);
  copied_.emplace(values.device().type());
  copied_->record(c10::impl::VirtualGuardImpl(values.device().type()).getStream(values.device()));
}

const at::Tensor& Readback::wait() {
  if (copied_) copied_->synchronize();
  return host_;
}

}  // namespace annulus
