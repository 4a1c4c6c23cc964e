// OpenedModel: a model to compute with and not to train, from where its weights lie: a run, or a folder in Hugging
// Face's layout. Used by the sampler and by logits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "config/config.h"
#include "model/parameters.h"
#include "training/run/tensor_slice.h"

namespace annulus {

// Not thread-safe.
class OpenedModel {
 public:
  // `which`: a folder with a config.json, a run's folder, or the name of a run below `root` (find_run). Reads what says
  // which model it is, no weights. `step`: of a run's checkpoint; none: the newest that is whole. Raises Error(kInput)
  // where there is nothing of this name, or what read_folder_config and load_config raise; Error(kUsage) for a step of
  // what is no run.
  OpenedModel(const std::string& which, const std::string& root, std::optional<int64_t> step);

  const std::string& path() const { return path_; }
  const ModelSection& model() const { return model_; }
  int64_t context() const { return context_; }  // positions of the longest sequences that it was trained on
  // A run's configuration; none for a folder in Hugging Face's layout.
  const std::optional<Config>& run() const { return run_; }

  // Takes the memory of the values and fills them; where they are not fp32 on a CPU, by way of an fp32 copy of one unit
  // at a time. `notes`: damaged checkpoints passed over are told there. Raises Error(kInput) where there is no whole
  // checkpoint, none of that step, or a tensor is not what the model needs.
  void load(Parameters& parameters, std::ostream& notes);

  // Whether tokens are ids of a tokenizer, not bytes; and of which step the weights are (-1: of no run's). Known once
  // load has returned.
  bool tokens_are_ids() const { return ids_; }
  int64_t step() const { return step_; }

 private:
  using Read = std::function<void(const std::vector<TensorSlice>&)>;
  void load_checkpoint(Parameters& parameters, std::ostream& notes);

  std::string path_;
  std::optional<int64_t> wanted_;
  std::optional<Config> run_;
  ModelSection model_;
  int64_t context_ = 0;
  bool ids_ = true;
  int64_t step_ = -1;
};

}  // namespace annulus
