// What a configuration says of a training job, before there is one: its model, mesh and optimizer, and whether it can
// be at all. Used by training.cc, memory_plan.cc, the trainer, the sampler and the launcher. Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <vector>

#include "config/config.h"
#include "model/model.h"
#include "training/layer_requests.h"
#include "training/mesh.h"
#include "training/state/optimizer.h"

namespace annulus {

// The decoder that a configuration describes, and what it computes in.
ModelShape model_shape(const Config& config);
at::ScalarType compute_dtype(const Config& config);
// Its [mesh], not fitted to any ranks yet.
std::vector<MeshAxis> mesh_axes(const Config& config);
// What learning_rate() follows, with the rest of the optimizer's numbers.
OptimizerSettings optimizer_settings(const Config& config);

// Everything about a configuration that can be wrong for a number of ranks: mesh, rows over the data axis, heads,
// length, layout, patterns. Raises Error(kPlan), on every rank alike, before memory is taken or anything is sent;
// Error(kInput) where a file of block maps cannot be read, which may be so on one host alone. What was read and checked
// is what a Training is made with.
std::vector<Stage> check_training(const Config& config, int ranks);

}  // namespace annulus
