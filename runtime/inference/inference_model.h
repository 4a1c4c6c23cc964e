// InferenceModel: the weights of an opened model on the ranks of a communicator, whole or sharded. Used by logits.h, by
// runtime/evaluation and by generated text. Not thread safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "comm/communicator.h"
#include "runtime/inference/opened_model.h"
#include "runtime/model/fused_ops.h"
#include "runtime/model/model.h"
#include "runtime/training/state/model_state.h"

namespace annulus {

class InferenceModel {
 public:
  struct Settings {
    at::ScalarType dtype = at::kFloat;
    at::Device device = at::kCPU;
    // Each rank keeps its part of the weights alone. A forward gathers those of each half of a layer before it needs
    // them, so it is collective: all ranks must run the same forwards in the same order.
    bool sharded = false;
  };

  // Reads the weights. Collective: raises what OpenedModel::load raises, on all ranks, and Error(kMismatch) if the
  // ranks have read different weights. `module` names the subcommand in messages. `world` must outlive this.
  InferenceModel(OpenedModel& opened, const Settings& settings, Communicator& world, const std::string& module);

  Model& model() { return model_; }
  const Model& model() const { return model_; }

  // Returns the bytes that a rank holds of a model's weights during forwards; an estimate in fp64 because sizes of a
  // config.json may be beyond any integer.
  static double weight_bytes(const ModelShape& shape, const Computes& on, int ranks, bool sharded);

 private:
  Model model_;
  std::optional<ModelState> state_;  // if the weights are sharded
};

// Raises Error(kResource) from `module` if `bytes`, which the ranks of this host need for `what`, are not free on the
// device. `instead` says how to need less.
void require_free(const std::string& module, const std::string& what, double bytes, int ranks_here, at::Device device,
                  const std::string& instead);

}  // namespace annulus
