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

// For this many ranks along the mesh's context axis. Everything that can be wrong with them raises Error(kPlan), or
// Error(kInput) for files.
LayerRequests layer_requests(const Config& config, int context_ranks);

}  // namespace annulus
