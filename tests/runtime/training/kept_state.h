// Keeps in memory what the ranks of a training job would write into a checkpoint: the whole state, whichever part of it
// each rank holds. Used by tests that resume without files.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "memory/tiers/tiered_tensors.h"
#include "runtime/training/training.h"

namespace annulus {

// Ranks may call keep() concurrently from their own threads. All ranks must have called keep() before any calls
// restore().
class KeptState {
 public:
  void keep(const Training& training) {
    const std::lock_guard lock(mutex_);
    state = training.state();
    for (const TensorSlice& slice : training.slices_to_write()) {
      at::Tensor& whole = tensors[slice.name];
      const PlacedVector part = slice.elements();
      if (!whole.defined()) whole = at::zeros(slice.shape, part.scalar_type());
      whole.view({-1}).narrow(0, slice.begin, part.numel()).copy_(part.read(0, part.numel()));
    }
  }
  void restore(Training& training) const {
    training.restore(state, [&](const std::vector<TensorSlice>& into) {
      for (const TensorSlice& slice : into) {
        const PlacedVector part = slice.elements();
        part.write(0, tensors.at(slice.name).view({-1}).narrow(0, slice.begin, part.numel()));
      }
    });
  }

  TrainingState state;
  std::map<std::string, at::Tensor> tensors;

 private:
  std::mutex mutex_;
};

// Keeps the state of all ranks of a world; returns once all have kept theirs. Collective.
inline void keep_together(KeptState& kept, const Training& training, Communicator& world) {
  kept.keep(training);
  world.barrier({"keeping a state", 0});
}

}  // namespace annulus
