// What a kernel is given besides its tiles: blocks of key/value buffers, and what is alike for all tiles of a call.
// Used by kernels, by what they share (this folder), and by who runs programs: the executor, benchmarks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "attention/plan/plan.h"
#include "attention/tiles/dropout.h"

namespace annulus {

// A block of a key/value buffer, or of a gradient buffer with dk and dv: which batch rows and kv heads its tensors
// hold.
struct KeyBlock {
  at::Tensor k, v;  // [batch.count, rows, heads.count, D]
  Span batch;       // global batch rows
  Span heads;       // global kv heads
  // Of gradients: the tensors hold nothing yet. The kernel sets them, which is less than adding to zeros.
  bool fresh = false;
};

// What is alike for all tiles of a call.
struct KernelCall {
  double scale = 1;
  int64_t group = 1;  // H / Hk: query heads that read one kv head
  Dropout dropout;
};

// Called between pieces of work of a few milliseconds, so that transfers move on.
using Poll = std::function<void()>;

}  // namespace annulus
