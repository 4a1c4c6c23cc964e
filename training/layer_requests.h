// The plan requests of a model's layers, from a configuration: what training (training.cc) plans its attention from.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/plan.h"
#include "config/config.h"

namespace annulus {

struct LayerRequests {
  // Of the global batch, without documents of the data; block maps of files are read.
  std::vector<PlanRequest> distinct;
  std::vector<size_t> of_layer;  // index into `distinct`

  // (query, key) pairs counted for one token, all layers and query heads together; adaptive maps as if they kept the
  // blocks nearest to the diagonal.
  double pairs_per_token() const;

  // `distinct` for these rows of the global batch: what a data rank has.
  std::vector<PlanRequest> of_rows(int64_t first, int64_t count) const;
};

// A stage of the data: how long rows are from `step` on, how many of them pass through the model together, how often in
// a step, and what their attention is planned from.
struct Stage {
  int64_t step = 0;
  int64_t context = 0;
  int64_t batch = 0;       // rows, over all ranks
  int64_t accumulate = 1;  // batches of a step
  LayerRequests layers;

  int64_t tokens() const { return batch * accumulate * context; }  // of a step
};

// The stages of a configuration, in their order, for this many ranks along the mesh's context axis. Everything that can
// be wrong with them raises Error(kPlan), or Error(kInput) for files.
std::vector<Stage> training_stages(const Config& config, int context_ranks);

}  // namespace annulus
