// What a run or a folder in Hugging Face's layout is: its shape, its parameters, what it costs to compute with and to
// train. Used by the verb `inspect`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "training/memory_plan.h"

namespace annulus {

struct Inspection {
  std::string path;
  bool is_run = false;
  ModelSection model;
  std::string family;     // model_type in Hugging Face's layout; of a run, as which it would be exported
  std::string no_family;  // why a run cannot be exported, where it cannot
  int64_t context = 0;    // positions: max_position_embeddings, or the longest rows of a run
  int64_t parameters = 0;

  struct Pattern {
    std::string text;
    std::vector<int64_t> layers;
  };
  std::vector<Pattern> patterns;  // in the order of the first layer of each

  // Of a folder: the dtypes of its tensors ("BF16"). Of a run: the step of its newest checkpoint, and "F32"; none:
  // there is no checkpoint.
  std::vector<std::string> dtypes;
  std::optional<int64_t> step;
  int64_t weight_bytes = 0;  // in the files, the optimizer's left out

  int64_t length = 0;          // of the sequences that the rest is said for
  double flops = 0;            // of a token, forward and backward
  double attention_flops = 0;  // of these, for pairs of a query and a key
  // Of a rank that shares with nobody, for one row: what training takes.
  MemoryKinds training;
  int64_t import_bytes = 0;  // of the host at most, while it reads a folder's weights: all of them in fp32, and a block
  int64_t export_bytes = 0;  // of the host at most, while it exports: a block
};

// `which`, `root`: as of OpenedModel. `length`: none: the context. Raises what opening the folder, its weights or the
// run raises; Error(kPlan) where a pattern cannot be for the length.
Inspection inspect_model(const std::string& which, const std::string& root, std::optional<int64_t> length);

}  // namespace annulus
