// The inputs of a kernel besides its tiles: blocks of key/value buffers, and the parameters of a call. Used by kernels,
// by this package, and by code that runs programs (the executor, benchmarks).
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
  // For gradients: the tensors are uninitialized. The kernel sets them, which is cheaper than adding to zeros.
  bool fresh = false;
  // For keys and values: the caller's cache of whether they are finite, set by the first kernel that checks.
  Finite* finite = nullptr;
};

// The parameters that all tiles of a call share.
struct KernelCall {
  double scale = 1;
  double softcap = 0;  // c > 0: scores are c tanh(scale / c * q.k); 0: scale * q.k
  int64_t group = 1;   // H / Hk, the query heads per kv head
  Dropout dropout;
  // Program::number of the tiles' program, under which kernels may cache data derived from its tiles; 0 if the program
  // will not run again.
  uint64_t program = 0;
  // Whether one call of forward() or backward() has all tiles of its direction, so that the kernel may produce its
  // results directly in the inputs' dtype.
  bool at_once = false;
  const MaskPlanes* masks = nullptr;  // Program::masks, if tiles refer to masks

  // Returns the tile's mask; null if it has none.
  const MaskPlane* mask_of(const Tile& tile) const {
    return tile.mask < 0 ? nullptr : &(*masks)[static_cast<size_t>(tile.mask)];
  }
};

// Called between pieces of work of a few milliseconds to progress transfers. May be empty.
using Poll = std::function<void()>;

}  // namespace annulus
