// See upload.h.
#include "memory/upload.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#ifdef ANNULUS_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace annulus {
namespace {

// Whether a CUDA graph is being captured from the current stream.
bool capturing() {
#ifdef ANNULUS_CUDA
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
#else
  return false;
#endif
}

}  // namespace

at::Tensor upload(const at::Tensor& host, at::Device device) {
  if (device.is_cpu()) return host;
  // A copy from pageable memory would make the host wait for all work on the stream.
  return host.pin_memory().to(device, host.scalar_type(), /*non_blocking=*/true);
}

void KeptUploads::mark(at::Device device) {
  if (device.is_cpu()) return;
  captured_ = capturing();
  if (captured_) return;
  const c10::impl::VirtualGuardImpl streams(device.type());
  uploaded_.emplace(device.type());
  uploaded_->record(streams.getStream(device));
}

void KeptUploads::read(std::initializer_list<at::Tensor> tensors) const {
  if (!uploaded_) return;
  const c10::impl::VirtualGuardImpl streams(uploaded_->device_type());
  const c10::Stream stream = streams.getStream(uploaded_->device());
  if (!there_) {
    if (capturing() || uploaded_->query()) {
      there_ = true;
    } else {
      uploaded_->block(stream);
    }
  }
  for (const at::Tensor& t : tensors) {
    if (t.defined()) t.record_stream(stream);
  }
}

}  // namespace annulus
