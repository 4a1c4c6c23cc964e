// OpenedModel: a model from a run or from a folder in Hugging Face's layout, opened for inference. Used by
// inference_model.h, sampler.cc and inspection.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/model/parameters.h"
#include "runtime/run/tensor_slice.h"

namespace annulus {

// Not thread safe.
class OpenedModel {
 public:
  using Note = std::function<void(const std::string&)>;

  // Reads the model's description, but no weights. `which` is a folder with a config.json, a run's folder, or the name
  // of a run below `root` (find_run). `step` selects a run's checkpoint; the default is the newest intact one. Raises
  // Error(kInput) if there is nothing of this name, Error(kUsage) for a step of anything but a run, and the errors of
  // read_folder_config and load_config.
  OpenedModel(const std::string& which, const std::string& root, std::optional<int64_t> step);

  const std::string& path() const { return path_; }
  const ModelSection& model() const { return model_; }
  int64_t context() const { return context_; }  // the maximum sequence length of its training
  // Returns the folder in which a run keeps its tokenizer, whether it has one or not.
  std::string tokenizer_folder() const;
  // Returns a run's configuration; nullopt for a folder in Hugging Face's layout.
  const std::optional<Config>& run() const { return run_; }

  // Allocates the parameters' values and fills them. Reports skipped, damaged checkpoints to `note`. Raises
  // Error(kInput) if there is no intact checkpoint or none of that step, or if a tensor does not match the model.
  void load(Parameters& parameters, const Note& note);
  // Fills slices of parameters, through fp32 copies of at most 256 MiB or one slice unless they are fp32 or fp64 on a
  // CPU.
  void load(const std::vector<TensorSlice>& into, const Note& note);

  // Return whether tokens are ids of a tokenizer, not bytes, and the step of the weights (-1 for a folder in Hugging
  // Face's layout). Valid after load().
  bool tokens_are_ids() const { return ids_; }
  int64_t step() const { return step_; }

 private:
  void load_checkpoint(const std::vector<TensorSlice>& into, const Note& note);

  std::string path_;
  std::optional<int64_t> wanted_;
  std::optional<Config> run_;
  ModelSection model_;
  int64_t context_ = 0;
  bool ids_ = true;
  int64_t step_ = -1;
};

}  // namespace annulus
