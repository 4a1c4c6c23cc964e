// What training jobs would write into checkpoints, kept in memory: of all ranks together, whatever part of it each
// holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "training/training.h"

namespace annulus {

// Ranks may call on threads of their own. What one reads all must have kept.
class KeptState {
 public:
  void keep(const Training& training) {
    const std::lock_guard lock(mutex_);
    state = training.state();
    for (const TensorSlice& slice : training.slices_to_write()) {
      at::Tensor& whole = tensors[slice.name];
      if (!whole.defined()) whole = at::zeros(slice.shape, slice.values.options().device(at::kCPU));
      whole.view({-1}).narrow(0, slice.begin, slice.values.numel()).copy_(slice.values);
    }
  }
  void restore(Training& training) const {
    training.restore(state, [&](const std::vector<TensorSlice>& into) {
      for (const TensorSlice& slice : into) {
        at::Tensor(slice.values).copy_(tensors.at(slice.name).view({-1}).narrow(0, slice.begin, slice.values.numel()));
      }
    });
  }

  TrainingState state;
  std::map<std::string, at::Tensor> tensors;

 private:
  std::mutex mutex_;
};

// Of all ranks of a world.
inline void keep_together(KeptState& kept, const Training& training, Communicator& world) {
  kept.keep(training);
  world.barrier({"keeping a state", 0});
}

}  // namespace annulus
