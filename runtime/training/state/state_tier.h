// What of a model's state lies in a tier with optimizer.offload (memory/tiers/tiered_tensors.h): the moments of what a
// rank updates, and the values themselves where the leaves have another dtype. Used by the memory plan and by training,
// which makes the tier. Thread safety: functions without state.
#pragma once

#include <cstdint>

#include "runtime/model/parameters.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

// All sizes are in bytes and of one rank.
struct StateTier {
  int64_t moved = 0;    // that an update reads from the tier, and then writes to it
  int64_t in_file = 0;  // that the tier takes, if it is a file
  int64_t pinned = 0;   // that it takes, if it is pinned memory
  int64_t buffers = 0;  // of the chunk buffers on the device
};
// Returns it for a state with these traits; `parameters` must have been laid out. `chunk`: as in TieredTensors.
StateTier state_tier(const Parameters& parameters, const StateTraits& traits, int64_t chunk);
StateTier state_tier(const Parameters& parameters, const StateTraits& traits);

}  // namespace annulus
