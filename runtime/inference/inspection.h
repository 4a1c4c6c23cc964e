// Describes a run or a folder in Hugging Face's layout: the model's shape, parameters, FLOPs and memory. Used by the
// subcommand `inspect`. Thread safe: a function without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/config/config.h"
#include "runtime/training/memory_plan.h"

namespace annulus {

struct Inspection {
  std::string path;
  bool is_run = false;
  ModelSection model;
  std::string family;     // model_type in Hugging Face's layout; for a run, that of its export
  std::string no_family;  // why a run cannot be exported; otherwise empty
  int64_t context = 0;    // max_position_embeddings, or the longest rows of a run
  int64_t parameters = 0;

  struct Pattern {
    std::string text;
    std::vector<int64_t> layers;
  };
  std::vector<Pattern> patterns;  // distinct, in the order of their first layers

  // For a folder, the dtypes of its tensors ("BF16"). For a run, "F32" and the step of its newest checkpoint; both are
  // empty if there is no checkpoint.
  std::vector<std::string> dtypes;
  std::optional<int64_t> step;
  int64_t weight_bytes = 0;  // in the files, without the optimizer's state

  int64_t length = 0;          // sequence length, in tokens, of the following members
  double flops = 0;            // per token, forward and backward
  double attention_flops = 0;  // the part for (query, key) pairs
  // The memory in bytes of a training step on one row, on a rank with the whole state.
  MemoryKinds training;
  int64_t import_bytes = 0;  // peak host memory of reading a folder's weights: all in fp32, and a block
  int64_t export_bytes = 0;  // peak host memory of an export: a block
};

// `which` and `root` are as in OpenedModel; `length` defaults to the context. Raises the errors of opening the folder,
// its weights or the run, and Error(kPlan) if a pattern is invalid for the length.
Inspection inspect_model(const std::string& which, const std::string& root, std::optional<int64_t> length);

}  // namespace annulus
