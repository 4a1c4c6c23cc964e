// The memory that a training step needs on a rank, worked out from a configuration before any is taken: what the
// trainer prints, and what tests hold against what LibTorch's allocator really hands out. It is the sum of what parts
// declare beside the code that takes it (memory/charge.h); nothing is known here of what they hold.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "config/config.h"
#include "memory/available.h"
#include "memory/charge.h"
#include "training/layer_requests.h"
#include "training/state/sharding.h"
#include "training/training_charges.h"

namespace annulus {

// What a rank holds at most, in bytes, by what it is for.
struct MemoryKinds {
  int64_t weights = 0, gradients = 0, optimizer = 0;
  int64_t activations = 0;  // kept for the backward when the forward has ended
  // What comes besides where the most is held: what operators and attention take, weights that are gathered, gradients
  // that are being summed, and the step's input.
  int64_t working = 0;

  int64_t total() const { return weights + gradients + optimizer + activations + working; }
};

// Bytes.
struct MemoryPlan {
  StepCharges step;
  // What all caches may hold at most (memory/caches.h), and the part of it that lies on the device. Stated besides:
  // what they will hold depends on the plans, the total is what a step is expected to take.
  int64_t caches = 0;
  int64_t caches_on_device = 0;
  // Several ranks, and a pattern that selects its blocks at run time: what travels for it comes besides, too.
  bool selects_what_travels = false;

  // At most at once.
  int64_t total() const { return step.most().bytes; }
  // Which of it is what; they add up to total().
  MemoryKinds kinds() const;
  // Of that, what is there besides what lasts and what is kept for the backward when the forward has ended. Where the
  // most is needed later in the backward, some of what was kept is gone by then and counts against it.
  int64_t working() const { return total() - step.lasting() - step.kept(); }
  // "12.3 GB a rank planned: weights 2.5, ...; caches besides: at most 1.9 GB".
  std::string text() const;
};

// For rank `rank` of the mesh's context axis of `context_ranks`; `stages` of training_stages() for as many, `sharding`
// of make_sharding() for all ranks. Of several stages, that which takes the most. Of block maps that are selected at
// run time it is not known what they make travel: text() says so.
MemoryPlan plan_memory(const Config& config, const std::vector<Stage>& stages, const Sharding& sharding,
                       int context_ranks, int rank, RanksAre are);

// Bytes that a rank holds at the least, whatever the plan: its part of weights, gradients and moments, the residual
// stream of each layer. To be asked before plan_memory, which is not for sizes that no machine has: in fp64, nothing is
// too large.
double least_memory(const Config& config, const Sharding& sharding, int context_ranks);

// Products of sizes beyond this are beyond 64 bits before long: no machine has as many bytes, and no plan is made.
inline constexpr double kAnyMachine = 1e16;

// Raises Error(kResource) where `ranks` ranks that need `bytes` each are more than is available (none: not known), or
// more than any machine has. `what`: "at least " where that much is needed whatever else. `nearest` says what would fit
// (training/fitting.h); it is asked only where that is told. ANNULUS_MEMORY_CHECK=0 leaves the first of the two out.
void require_memory(const char* what, double bytes, int ranks, const std::optional<AvailableMemory>& available,
                    const std::function<std::string()>& nearest);

}  // namespace annulus
