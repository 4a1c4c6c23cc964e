// The inputs of a kernel besides its tiles: blocks of key/value buffers, and the values that all tiles of a call share.
// Used by kernels, by the code of this folder, and by code that runs programs (the executor, benchmarks).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "attention/dropout/dropout.h"
#include "attention/plan/plan.h"

namespace annulus {

// Whether all elements of some tensors are finite.
enum class Finite : char { kUnknown, kYes, kNo };

// A block of a key/value buffer, or of a gradient buffer with dk and dv.
struct KeyBlock {
  at::Tensor k, v;  // [batch.count, rows, heads.count, D]
  Span batch;       // the global batch rows in the tensors
  Span heads;       // the global kv heads in the tensors
  // For gradients: the tensors hold nothing yet. The kernel sets them, which costs less than adding to zeros.
  bool fresh = false;
  // For keys and values: where the caller keeps what is known of them. A kernel that has looked sets it.
  Finite* finite = nullptr;
};

// The values that all tiles of a call share.
struct KernelCall {
  double scale = 1;
  int64_t group = 1;  // H / Hk, the number of query heads that read one kv head
  Dropout dropout;
  // The number of the program that the tiles are part of (Program::number), if calls of it come again; else 0. Kernels
  // may keep what they make from its tiles.
  uint64_t program = 0;
  // Whether all tiles of a direction come in one call of forward() or backward(). A kernel may then make its results in
  // the inputs' dtype at once.
  bool at_once = false;
};

// Is called between pieces of work of a few milliseconds to advance transfers. May be empty.
using Poll = std::function<void()>;

}  // namespace annulus
