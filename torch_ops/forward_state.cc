// See forward_state.h.
#include "torch_ops/forward_state.h"

#include <ATen/ops/from_blob.h>

#include <utility>

#include "common/error.h"

namespace annulus::torch_ops {
namespace {

struct Holder {
  alignas(64) uint8_t content = 0;  // torch.compile copies what is not aligned
  std::shared_ptr<const ForwardState> state;
};

void release(void* holder) { delete static_cast<Holder*>(holder); }

}  // namespace

at::Tensor hold(std::shared_ptr<const ForwardState> state) {
  auto* const holder = new Holder{.state = std::move(state)};
  return at::for_blob(&holder->content, {1}).context(holder, release).options(at::kByte).make_tensor();
}

std::shared_ptr<const ForwardState> state_of(const at::Tensor& held) {
  const at::DataPtr& data = held.storage().data_ptr();
  if (data.get_deleter() != release) {
    throw Error(ErrorKind::kUsage, "torch",
                "attention_backward: `state` must be the tensor that attention_forward gave in this process, not a "
                "copy of it; hooks that copy saved tensors cannot be used with attention");
  }
  return static_cast<const Holder*>(data.get_context())->state;
}

}  // namespace annulus::torch_ops
