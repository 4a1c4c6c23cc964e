// See training_charges.h.
#include "runtime/training/training_charges.h"

#include <ATen/OpMathType.h>

#include <algorithm>

#include "memory/tiers/transfers.h"
#include "runtime/training/job.h"
#include "runtime/training/offload_config.h"

namespace annulus {

bool may_be_recorded(const Config& c, const Stage& stage, const Sharding& sharding, int ranks) {
  const std::vector<PlanRequest>& requests = stage.layers.distinct;
  return c.cuda_graphs == "auto" && offloaded_layers(c) == 0 && c.optimizer.offload == "none" && sharding.level < 2 &&
         ranks == c.mesh.data && !c.data.documents && c.data.positions == "running" && c.model.dropout == 0 &&
         std::ranges::none_of(requests, [](const PlanRequest& request) { return is_adaptive(request.pattern); });
}

StateTraits state_traits(const Config& c, const Sharding& sharding, bool recorded) {
  return {.dtype = compute_dtype(c),
          .sharding = sharding,
          .accumulate = c.data.accumulate.most(),
          .recorded = recorded,
          .weight_decay = c.optimizer.weight_decay,
          .groups = c.optimizer.groups,
          .offloaded = c.optimizer.offload != "none"};
}

std::vector<PlaceCharges> add_training_charges(const Config& c, const Stage& stage, int64_t positions, int ranks,
                                               const Sharding& sharding, RanksAre are, StepCharges& step) {
  const bool gpu = are == RanksAre::kGpus;
  const ModelShape shape = model_shape(c);
  const at::ScalarType dtype = compute_dtype(c);
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  const bool restart = c.data.positions == "restart" || layout_follows_documents(c);
  const int64_t rows = stage.batch / c.mesh.data;
  const int64_t batch = (2 + (restart ? 1 : 0) + (stage.weighs ? 1 : 0)) * rows * positions * 8;
  const int64_t turned = restart ? stage.context : positions;  // number of positions in a rotary table
  const int64_t of_position = static_cast<int64_t>(shape.rotaries().distinct.size()) * shape.head_dim() * wide;
  const bool recorded = gpu && may_be_recorded(c, stage, sharding, ranks);
  Parameters parameters(described_units(shape));
  parameters.lay_out(sharding.shards);
  StateTraits traits = state_traits(c, sharding, recorded);
  traits.messages = are == RanksAre::kProcesses;
  std::vector<PlaceCharges> places = add_state_charges(parameters, shape.tie_embeddings, traits, step);
  // On a CPU a step uses its tokens in the memory that they were read into.
  const int64_t inputs = gpu ? batch : kTokenSlots * stage.accumulate * batch;
  step.lasts({"inputs", inputs + turned * of_position, When::kLasts});
  step.lasts({"buffers of files", gpu ? 0 : offloaded_files(c) * Transfers::kHeld, When::kLasts});
  // If positions restart, each step gathers rotary tables for the positions of its rows.
  step.then({"batch", {{"rotary tables", restart ? rows * positions * of_position : 0, When::kKept}}});
  // A recorded step keeps its memory (step_graph.h), so the memory of a validation is added to it.
  const bool validated = c.validation.every > 0 && c.validation.batches > 0 && c.data.validation_fraction > 0;
  const int64_t validation = recorded && validated ? layer_forward_bytes(shape, rows, positions, {dtype, gpu}) : 0;
  step.lasts({"validation", validation, When::kLasts});
  return places;
}

}  // namespace annulus
