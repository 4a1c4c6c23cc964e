// The memory that a training step needs on a rank, worked out from a configuration before any is taken: what the
// trainer prints, and what tests hold against what LibTorch's allocator really hands out. It is the sum of what parts
// declare beside the code that takes it (memory/charge.h); nothing is known here of what they hold.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/config.h"
#include "memory/available.h"
#include "memory/charge.h"
#include "training/layer_requests.h"

namespace annulus {

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
  // Of that, what is there besides what lasts and what is kept for the backward when the forward has ended. Where the
  // most is needed later in the backward, some of what was kept is gone by then and counts against it.
  int64_t working() const { return total() - step.lasting() - step.kept(); }
  // "12.3 GB a rank planned: weights 2.5, ...; caches besides: at most 1.9 GB".
  std::string text() const;
};

// For rank `rank` of the mesh's context axis of `context_ranks`; `stages` of training_stages() for as many. Of several
// stages, that which takes the most. Of block maps that are selected at run time it is not known what they make travel:
// text() says so.
MemoryPlan plan_memory(const Config& config, const std::vector<Stage>& stages, int context_ranks, int rank, bool gpu);

// Bytes that a rank holds at the least, whatever the plan: weights, gradients, moments, the residual stream of each
// layer. To be asked before plan_memory, which is not for sizes that no machine has: in fp64, nothing is too large.
double least_memory(const Config& config, int context_ranks);

// Raises Error(kResource) where `ranks` ranks that need `bytes` each are more than is available (none: not known), or
// more than any machine has. `what`: "at least " where that much is needed whatever else. ANNULUS_MEMORY_CHECK=0 leaves
// the first of the two out.
void require_memory(const char* what, double bytes, int ranks, const std::optional<AvailableMemory>& available);

}  // namespace annulus
