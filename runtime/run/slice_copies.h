// SliceCopies: the memory to which a save copies a rank's slices, so that training can change them while the copies are
// written. Used by checkpoint_save.cc. It comes from the pool of the process (memory/pool/pool.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/run/tensor_slice.h"

namespace annulus {

// Not thread safe. The memory is kept between saves, so that a run takes it once.
class SliceCopies {
 public:
  // Returns slices with the same names, shapes and elements, whose values lie in this object's memory and are valid
  // until the next call. Values on a GPU have been read when this returns; those in a tier are read part by part.
  std::vector<TensorSlice> copy(const std::vector<TensorSlice>& slices);

  int64_t bytes() const { return memory_.defined() ? memory_.numel() : 0; }  // held

  // Each copy begins at a multiple of this many bytes, which every dtype's size divides.
  static constexpr int64_t kAligned = 64;

 private:
  at::Tensor memory_;  // uint8 [bytes]
};

}  // namespace annulus
