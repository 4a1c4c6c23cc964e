// See opened_model.h.
#include "runtime/inference/opened_model.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "comm/threads/threads.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/huggingface/weights.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/run_folder.h"

namespace annulus {
namespace {

bool holds_weights(const std::string& folder) {
  std::error_code error;
  const std::filesystem::directory_iterator files(folder, error);
  return std::any_of(begin(files), end(files),
                     [](const auto& file) { return file.path().extension() == ".safetensors"; });
}

TrainingState newest_state(CheckpointStore& store, const Config& config, const std::string& run,
                           const OpenedModel::Note& note) {
  std::vector<std::string> skipped;
  std::optional<TrainingState> state =
      store.open_newest_valid(*make_self_communicator(), &skipped, CheckpointPart::kModel);
  for (const std::string& reason : skipped) note("skipped a checkpoint: " + reason);
  if (!state) {
    throw Error(ErrorKind::kInput, "model",
                "there is no usable checkpoint in " + run +
                    (skipped.empty() ? ": training writes the first after " +
                                           (config.checkpoint.every > 0
                                                ? "checkpoint.every = " + counted(config.checkpoint.every, "step")
                                                : "run.steps = " + counted(config.run.steps, "step"))
                                     : " (" + std::to_string(skipped.size()) + " damaged)"));
  }
  return std::move(*state);
}

// Fills the parameters unit by unit, with `read`, which fills tensors of the dtype that optimizers update.
void fill(Parameters& parameters, const std::function<void(const std::vector<TensorSlice>&)>& read) {
  const at::ScalarType updated = at::toOpMathType(parameters.dtype());
  const bool straight = parameters.dtype() == updated && parameters.device().is_cpu();
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    at::Tensor values = parameters.values(unit).tensor();
    const at::Tensor wide = straight ? values : at::empty({values.numel()}, at::TensorOptions(updated));
    const ParameterUnit& of = parameters.units()[unit];
    std::vector<TensorSlice> slices;
    for (size_t i = of.first; i < of.last; ++i) {
      const ParameterInfo& p = parameters.list()[i];
      slices.push_back({p.name, p.shape, 0, wide.narrow(0, p.offset, p.count())});
    }
    read(slices);
    if (!straight) {
      for (size_t i = of.first; i < of.last; ++i) {
        const ParameterInfo& p = parameters.list()[i];
        values.narrow(0, p.offset, p.count()).copy_(wide.narrow(0, p.offset, p.count()));
      }
    }
  }
}

}  // namespace

OpenedModel::OpenedModel(const std::string& which, const std::string& root, std::optional<int64_t> step)
    : wanted_(step) {
  if (is_file(which + "/config.json") && !is_file(which + "/config.toml")) {
    if (step) {
      throw Error(ErrorKind::kUsage, "model",
                  "--step selects a checkpoint of a run, but " + which +
                      " is a folder in Hugging Face's layout; leave --step out");
    }
    path_ = which;
    const FolderConfig folder = read_folder_config(which);
    model_ = folder.model;
    context_ = folder.context;
    return;
  }
  try {
    path_ = find_run(root, which);
  } catch (const Error& error) {
    if (!holds_weights(which)) throw;
    throw Error(error.kind(), "model",
                which +
                    " has weights but no config.json, which describes their model: add the one that they were "
                    "published or saved with");
  }
  run_ = load_config(path_ + "/config.toml");
  model_ = run_->model;
  context_ = run_->data.context.longest();
}

void OpenedModel::load(Parameters& parameters, const Note& note) {
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    parameters.values(unit).take();
    at::Tensor(parameters.values(unit).tensor()).zero_();  // because the padding of a unit is compared as well
  }
  if (run_) {
    load_checkpoint(parameters, note);
    return;
  }
  const ModelWeights weights(path_, model_);
  fill(parameters, [&](const std::vector<TensorSlice>& into) { weights.read(into); });
}

void OpenedModel::load_checkpoint(Parameters& parameters, const Note& note) {
  CheckpointStore store(path_, run_->checkpoint.keep);
  for (;;) {
    const TrainingState state =
        wanted_ ? store.open(*wanted_, CheckpointPart::kModel) : newest_state(store, *run_, path_, note);
    try {
      fill(parameters, [&](const std::vector<TensorSlice>& into) { store.read(state, into); });
    } catch (const Error& error) {
      // A running job may have removed the checkpoint since it was opened; then there is a newer one.
      std::error_code unknown;
      if (wanted_ || error.kind() != ErrorKind::kInput || std::filesystem::exists(state.folder, unknown)) throw;
      continue;
    }
    const auto token = state.extra.find("token");
    ids_ = token != state.extra.end() && token->second == "id";
    step_ = state.step;
    return;
  }
}

}  // namespace annulus
