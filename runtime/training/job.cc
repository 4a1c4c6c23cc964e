// See job.h.
#include "runtime/training/job.h"

#include <string>

#include "attention/kernels/choose_kernel.h"
#include "common/error.h"
#include "common/simd/instruction_set.h"
#include "common/text.h"
#include "runtime/tensor_files/model_dtypes.h"
#include "runtime/training/offload_config.h"
#include "runtime/training/state/parameter_groups.h"

namespace annulus {

at::ScalarType compute_dtype(const Config& c) { return model_dtype(c.model.dtype, "model.dtype"); }

std::string instructions(const Config& c) {
  return instruction_set_name(instructions_for(compute_dtype(c) == at::kBFloat16));
}

std::vector<MeshAxis> mesh_axes(const Config& c) {
  // Gradients are summed over all ranks together (runtime/training/state/model_state.h), so nothing travels along
  // `data` alone.
  return {{.name = "data", .size = static_cast<int>(c.mesh.data), .connected = false},
          {.name = "context",
           .size = static_cast<int>(c.mesh.context),
           .options = {.max_ctas = static_cast<int>(c.network.exchange_ctas)}}};
}

OptimizerSettings optimizer_settings(const Config& c) {
  return {.schedule = parse_rate_schedule(c.optimizer.schedule),
          .lr = c.optimizer.lr,
          .min_lr_ratio = c.optimizer.min_lr_ratio,
          .warmup = c.optimizer.warmup,
          .decay = c.optimizer.decay,
          .steps = c.run.steps,
          .beta1 = c.optimizer.beta1,
          .beta2 = c.optimizer.beta2,
          .eps = c.optimizer.eps,
          .clip = c.optimizer.clip};
}

std::string rows_text(const DataConfig& data) {
  std::string text;
  for (const DataConfig::Stage& stage : data.stages()) {
    const int64_t tokens = stage.rows() * stage.context;
    text += (text.empty() ? with_commas(tokens, "token") + " a step"
                          : ", from step " + with_commas(stage.step + 1) + " on " + with_commas(tokens));
  }
  return text;
}

std::vector<Stage> check_training(const Config& c, int ranks) {
  validate(model_shape(c));
  if (!c.optimizer.groups.list.empty()) {
    Parameters parameters(described_units(model_shape(c)));
    parameters.lay_out(1);
    parameter_rates(parameters, c.optimizer.weight_decay, c.optimizer.groups);
  }
  const std::vector<MeshAxis> sizes = fit_axes(mesh_axes(c), ranks);
  const int data = sizes[0].size;
  const int context = sizes[1].size;
  parse_kernel(c.attention.kernel, "attention.kernel");
  if (c.memory.offload != "none" && !c.model.recompute) {
    throw Error(ErrorKind::kUsage, "train",
                "memory.offload = \"" + c.memory.offload +
                    "\" offloads what layers keep with recomputation: set model.recompute = true as well");
  }
  if (c.run.compare_copies > 0 && c.optimizer.shard == 3) {
    throw Error(ErrorKind::kUsage, "train",
                "run.compare_copies compares what several ranks hold alike, and with optimizer.shard = 3 they hold "
                "nothing alike: set it to 0, or use optimizer.shard = 2");
  }
  if (c.device == "cpu") require_no_host(c, "device is \"cpu\"");
  std::vector<Stage> stages = training_stages(c, context);
  for (const Stage& stage : stages) {
    if (stage.batch % data != 0) {
      const int64_t up = (stage.batch / data + 1) * data;
      throw Error(ErrorKind::kPlan, "train",
                  "a batch of " + counted(stage.batch, "row") + " cannot be split evenly over " + std::to_string(data) +
                      " data-parallel ranks: use data.batch = " + std::to_string(up) + " or mesh.data = 1");
    }
    if (stage.context < 2 * context) {
      throw Error(ErrorKind::kPlan, "train",
                  "data.context is " + std::to_string(stage.context) + ", too short for " + counted(context, "rank") +
                      ": it must be at least " + std::to_string(2 * context));
    }
  }
  return stages;
}

ModelShape model_shape(const Config& c) { return c.model; }

}  // namespace annulus
