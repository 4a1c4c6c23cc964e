// What a checkpoint of a Training holds, in memory instead of on the disk. For tests that go back to a state.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "training/training.h"

namespace annulus {

struct Snapshot {
  TrainingState state;
  std::vector<TensorSlice> slices;  // copies, on the CPU
};

inline Snapshot snapshot(const Training& training) {
  Snapshot taken{training.state(), training.slices()};
  for (TensorSlice& slice : taken.slices) slice.values = slice.values.cpu().clone();
  return taken;
}

// A snapshot of the same rank of as many.
inline void restore(Training& training, const Snapshot& from) {
  training.restore(from.state, [&](const std::vector<TensorSlice>& into) {
    ASSERT_EQ(into.size(), from.slices.size());
    for (size_t i = 0; i < into.size(); ++i) {
      ASSERT_EQ(into[i].name, from.slices[i].name);
      at::Tensor(into[i].values).copy_(from.slices[i].values);
    }
  });
}

}  // namespace annulus
