// See state_tier.h.
#include "runtime/training/state/state_tier.h"

#include <ATen/OpMathType.h>

#include <algorithm>

#include "memory/tiers/tiered_tensors.h"

namespace annulus {

StateTier state_tier(const Parameters& parameters, const StateTraits& t, int64_t chunk) {
  const at::ScalarType updated = at::toOpMathType(t.dtype);
  const auto size = static_cast<int64_t>(c10::elementSize(updated));
  const int64_t vectors = updated == t.dtype ? 2 : 3;
  StateTier tier;
  int64_t longest = 0;
  for (const ParameterUnit& unit : parameters.units()) {
    const int64_t own = t.sharding.level == 0 ? unit.elements : unit.elements / t.sharding.shards;
    tier.moved += vectors * own * size;
    tier.in_file += vectors * TieredTensors::in_file(own, size, chunk);
    tier.pinned += vectors * TieredTensors::in_pinned_memory(own, size, chunk);
    longest = std::max(longest, own);
  }
  tier.buffers = TieredTensors::buffers(vectors, longest, size);
  return tier;
}

StateTier state_tier(const Parameters& parameters, const StateTraits& traits) {
  return state_tier(parameters, traits, TieredTensors::kChunk);
}

}  // namespace annulus
