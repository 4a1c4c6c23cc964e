// What a training step holds (memory/charge.h) besides the model's parts and its attention. Used by the memory plan,
// and by the training that takes it. Thread safety: free functions without state.
#pragma once

#include <cstdint>
#include <vector>

#include "config/config.h"
#include "memory/charge.h"
#include "model/model.h"
#include "training/layer_requests.h"
#include "training/state/sharding.h"

namespace annulus {

// Steps whose tokens are there at once: the current one's and those that are read ahead.
inline constexpr int64_t kTokenSlots = 3;

// Whether the steps of a stage may be recorded on a GPU (step_graph.h): where each does the same work on the same
// memory and waits for no other rank before its gradients are there. `ranks`: of the world.
bool may_be_recorded(const Config& config, const Stage& stage, const Sharding& sharding, int ranks);

// What ranks compute on, and how they reach each other.
enum class RanksAre {
  kProcesses,  // with CPU tensors, over messages
  kThreads,    // of one process, with CPU tensors: tests and benchmarks
  kGpus,
};

// `recorded`: steps are.
StateTraits state_traits(const Config& config, const Sharding& sharding, bool recorded);

// What lasts, and what the step begins and ends with. `positions` of each row are this rank's, of `ranks` of the world.
// Returned is what the state takes besides at each place of the model.
std::vector<PlaceCharges> add_training_charges(const Config& config, const Stage& stage, int64_t positions, int ranks,
                                               const Sharding& sharding, RanksAre are, StepCharges& step);

}  // namespace annulus
