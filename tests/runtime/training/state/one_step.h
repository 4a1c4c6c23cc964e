// One step of training over ranks that are threads, for tests of what rows and targets it computes.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <mutex>
#include <utility>
#include <vector>

#include "comm/threads/threads.h"
#include "runtime/training/training.h"
#include "tests/runtime/model/flat_parameters.h"

namespace annulus {

// What a rank has after the step, all the same on each.
struct OneStep {
  StepResult step;
  at::Tensor gradients;   // of all weights
  double validation = 0;  // the loss, if there is a validation
  std::vector<SourceUse> uses;
};

inline OneStep one_step(const Config& config, int ranks) {
  const Dataset data(config.data, config.run.seed, config.model.vocab);
  std::mutex mutex;
  OneStep one;
  run_ranks(ranks, [&](Communicator& world) {
    Training training(config, world, data, at::kCPU);
    OneStep mine;
    mine.step = training.step();
    EXPECT_TRUE(mine.step.applied) << mine.step.note;
    mine.gradients = flat(training.model().parameters().views(
        [&](size_t unit) { return training.model_state().updated()[unit].gradients; }));
    if (data.has_validation()) mine.validation = training.validate([] { return false; }).loss;
    mine.uses = training.uses();
    const std::lock_guard lock(mutex);
    one = std::move(mine);
  });
  return one;
}

}  // namespace annulus
