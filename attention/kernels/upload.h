// Small host tensors (row numbers, tables, lengths) brought to the device of a call. Used by the kernels and by the
// executor.
#pragma once

#include <ATen/core/Tensor.h>

namespace annulus {

// The content of a CPU tensor on `device`: on a CPU the tensor itself, on a GPU a copy in the order of the current
// stream. The host does not wait for the device, and the tensor may be changed or freed at once: the copy is made from
// pinned memory that LibTorch's host allocator keeps until the stream has passed (while a CUDA graph is captured, as
// long as the graph lives).
at::Tensor upload(const at::Tensor& host, at::Device device);

}  // namespace annulus
