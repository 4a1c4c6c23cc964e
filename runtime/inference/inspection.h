// Describes a run or a folder in Hugging Face's layout: the model's shape and parameters, and what it costs to use and
// to train it. Used by the verb `inspect`. Thread safe: a function without state.
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
  std::string family;     // model_type in Hugging Face's layout; for a run, the one that an export would have
  std::string no_family;  // why a run cannot be exported; empty if it can
  int64_t context = 0;    // the number of positions: max_position_embeddings, or the longest rows of a run
  int64_t parameters = 0;

  struct Pattern {
    std::string text;
    std::vector<int64_t> layers;
  };
  std::vector<Pattern> patterns;  // the distinct patterns, in the order of the first layer of each

  // For a folder, the dtypes of its tensors ("BF16"). For a run, "F32" and the step of its newest checkpoint; both are
  // empty if there is no checkpoint.
  std::vector<std::string> dtypes;
  std::optional<int64_t> step;
  int64_t weight_bytes = 0;  // bytes of weights in the files, without the optimizer's state

  int64_t length = 0;          // tokens of the sequences for which the following members hold
  double flops = 0;            // FLOPs per token, forward and backward
  double attention_flops = 0;  // the part of these that depends on the number of (query, key) pairs
  // The memory in bytes of a training step on one row, on a rank that holds the whole state.
  MemoryKinds training;
  int64_t import_bytes = 0;  // the most host memory that reading a folder's weights takes: all in fp32, and a block
  int64_t export_bytes = 0;  // the most host memory that an export takes: a block
};

// `which` and `root` are those of OpenedModel. Without `length`, the context is used. Throws the errors of opening the
// folder, its weights or the run, and Error(kPlan) if a pattern is impossible for the length.
Inspection inspect_model(const std::string& which, const std::string& root, std::optional<int64_t> length);

}  // namespace annulus
