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

// The most bytes of tensors that are read at once because they are converted afterwards, unless one alone is larger.
constexpr int64_t kConverted = int64_t{256} << 20;

// Fills slices of any dtype and device with `read`, which fills those of the dtype that optimizers update.
void fill(const std::vector<TensorSlice>& into, const std::function<void(const std::vector<TensorSlice>&)>& read) {
  std::vector<TensorSlice> as_read;
  std::vector<at::Tensor> converted;
  int64_t bytes = 0;
  const auto finish = [&] {
    if (as_read.empty()) return;
    read(as_read);
    for (size_t i = 0; i < as_read.size(); ++i) {
      if (converted[i].defined()) converted[i].copy_(as_read[i].values);
    }
    as_read.clear();
    converted.clear();
    bytes = 0;
  };
  for (const TensorSlice& slice : into) {
    const at::ScalarType updated = at::toOpMathType(slice.values.scalar_type());
    const bool straight = slice.values.scalar_type() == updated && slice.values.is_cpu();
    const int64_t more = straight ? 0 : slice.values.numel() * static_cast<int64_t>(c10::elementSize(updated));
    if (bytes > 0 && bytes + more > kConverted) finish();
    as_read.push_back(slice);
    if (!straight) as_read.back().values = at::empty({slice.values.numel()}, at::TensorOptions(updated));
    converted.push_back(straight ? at::Tensor() : slice.values);
    bytes += more;
  }
  finish();
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

std::string OpenedModel::tokenizer_folder() const { return annulus::tokenizer_folder(path_); }

void OpenedModel::load(Parameters& parameters, const Note& note) {
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    parameters.values(unit).take();
    at::Tensor(parameters.values(unit).tensor()).zero_();  // because the padding of a unit is compared as well
  }
  load(whole_slices(parameters.value_views()), note);
}

void OpenedModel::load(const std::vector<TensorSlice>& into, const Note& note) {
  if (run_) {
    load_checkpoint(into, note);
    return;
  }
  const ModelWeights weights(path_, model_);
  fill(into, [&](const std::vector<TensorSlice>& slices) { weights.read(slices); });
}

void OpenedModel::load_checkpoint(const std::vector<TensorSlice>& into, const Note& note) {
  CheckpointStore store(path_, run_->checkpoint.keep);
  for (;;) {
    const TrainingState state =
        wanted_ ? store.open(*wanted_, CheckpointPart::kModel) : newest_state(store, *run_, path_, note);
    try {
      fill(into, [&](const std::vector<TensorSlice>& slices) { store.read(state, slices); });
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
