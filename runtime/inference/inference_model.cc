// See inference_model.h.
#include "runtime/inference/inference_model.h"

#include <algorithm>
#include <vector>

#include "comm/agreement.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "memory/device_memory.h"
#include "runtime/training/state/sharding.h"

namespace annulus {

InferenceModel::InferenceModel(OpenedModel& opened, const Settings& s, Communicator& world, const std::string& module)
    : model_(opened.model(), s.dtype, s.device, Model::Unheld{.parts = s.sharded ? world.size() : 1}) {
  const auto note = [&](const std::string& text) { log_warn_once_per_job(module, text); };
  if (s.sharded && world.size() > 1) {
    StateTraits traits{.dtype = s.dtype, .sharding = {.level = 3, .shards = world.size()}};
    traits.inference = true;
    state_.emplace(model_, world, traits, /*seed=*/0);
    together(world, {module + ", loading the weights"},
             [&] { opened.load(state_->slices("", nullptr, /*written=*/false), note); });
    state_->replaced();
    // A run may write checkpoints meanwhile, and each rank takes the newest.
    require_agreement(world, {{"step of the checkpoint", std::to_string(opened.step())}},
                      {module + ", comparing the checkpoints"});
    return;
  }
  Parameters& parameters = model_.parameters();
  std::vector<Field> weights;
  together(world, {module + ", loading the weights"}, [&] {
    opened.load(parameters, note);
    for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
      const at::Tensor values = parameters.values(unit).tensor().cpu();
      weights.push_back(
          {"weights of " + parameters.units()[unit].name, checksum(values.const_data_ptr(), values.nbytes())});
    }
  });
  require_agreement(world, weights, {module + ", comparing the weights"});
}

double InferenceModel::weight_bytes(const ModelShape& shape, const Computes& on, int ranks, bool sharded) {
  const double all = parameter_estimate(shape) * static_cast<double>(on.element());
  if (!sharded || ranks == 1 || all > 0x1p53) return all;
  int64_t before = 0, most = 0;  // the units of two neighbouring places are gathered at once
  for (const DescribedUnit& unit : described_units(shape)) {
    int64_t elements = 0;
    for (const ParameterShape& parameter : unit.parameters) elements += parameter.count();
    most = std::max(most, before + elements);
    before = elements;
  }
  return all / ranks + static_cast<double>(most * on.element());
}

void require_free(const std::string& module, const std::string& what, double bytes, int ranks_here, at::Device device,
                  const std::string& instead) {
  const std::optional<AvailableMemory> free = available_memory(device);
  if (!free || bytes <= static_cast<double>(free->bytes)) return;
  throw Error(ErrorKind::kResource, module,
              what + " need about " + bytes_text(bytes) +
                  (device.is_cuda() || ranks_here == 1 ? "" : " on " + counted(ranks_here, "rank") + " of this host") +
                  ", but " + bytes_text(static_cast<double>(free->bytes)) + " are free (" + free->limit +
                  "): " + instead);
}

}  // namespace annulus
