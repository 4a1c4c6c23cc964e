// Derives the model, mesh and optimizer settings of a training job from a configuration, and checks whether the job is
// possible. training.h, the memory plan and fitting.cc use it, and callers of those through training.h. Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/model/model.h"
#include "runtime/training/layer_requests.h"
#include "runtime/training/mesh.h"
#include "runtime/training/state/learning_rate.h"

namespace annulus {

// Return the decoder that a configuration describes and the dtype that it computes in.
ModelShape model_shape(const Config& config);
at::ScalarType compute_dtype(const Config& config);
// Returns the name of the vector instructions that attention on a CPU uses for this configuration.
std::string instructions(const Config& config);
// Returns the axes of [mesh], not yet fitted to a number of ranks (fit_axes).
std::vector<MeshAxis> mesh_axes(const Config& config);
// Returns what learning_rate() and AdamW are given.
OptimizerSettings optimizer_settings(const Config& config);

// Returns for example "65,536 tokens a step, from step 1,001 on 131,072".
std::string rows_text(const DataConfig& data);

// Checks everything about a configuration that may not suit a number of ranks: mesh, rows over the data axis, heads,
// length, layout, patterns. Returns the stages, from which a Training is made. Raises Error(kPlan), the same on every
// rank, before memory is taken or anything is sent; Error(kInput) if a file of block maps cannot be read, which may
// happen on one host alone.
std::vector<Stage> check_training(const Config& config, int ranks);

}  // namespace annulus
