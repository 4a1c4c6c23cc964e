// Declares the memory of a training step (memory/charge.h) other than that of the model's parts and its attention. The
// memory plan uses it; training.cc, which takes this memory, uses the same constants. Thread safety: no state.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/charge.h"
#include "runtime/config/config.h"
#include "runtime/model/model.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

// The number of steps whose tokens are in memory at once: those of the current step and those read ahead.
inline constexpr int64_t kTokenSlots = 3;

// Whether the steps of a stage may be recorded on a GPU (step_graph.h). This requires that each step does the same work
// on the same memory and waits for no other rank before its gradients are complete. `ranks` is the size of the world.
bool may_be_recorded(const Config& config, const Stage& stage, const Sharding& sharding, int ranks);

// What ranks compute on, and how they communicate.
enum class RanksAre {
  kProcesses,  // processes with CPU tensors, which send messages
  kThreads,    // threads of one process with CPU tensors, in tests and benchmarks
  kGpus,
};

// `recorded` says whether steps are recorded (step_graph.h).
StateTraits state_traits(const Config& config, const Sharding& sharding, bool recorded);

// Adds to `step` what lasts and what the step begins and ends with. `positions` is the number of this rank's positions
// in each row, `ranks` the size of the world. Returns what the state takes in addition at each place of the model.
std::vector<PlaceCharges> add_training_charges(const Config& config, const Stage& stage, int64_t positions, int ranks,
                                               const Sharding& sharding, RanksAre are, StepCharges& step);

}  // namespace annulus
