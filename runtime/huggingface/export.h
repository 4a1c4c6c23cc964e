// Exports a run's checkpoint as a folder in Hugging Face's layout: config.json, weights, tokenizer and generation
// files. Used by the verbs `export` and `inspect`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"

namespace annulus {

struct ExportOptions {
  std::string run;                   // the run's folder
  std::string out;                   // the new folder
  std::optional<int64_t> step = {};  // of the checkpoint; none: the newest undamaged one
  std::string dtype = {};            // "bf16", "fp32", "fp64"; empty: what the run computes in
  int64_t shard_bytes = 5'000'000'000;
  bool leave_pattern = false;  // as ConfigToWrite::leave_pattern
};

struct ExportedModel {
  int64_t step = 0;
  std::string architecture;        // "LlamaForCausalLM"
  std::string dtype;               // "bf16", "fp32", "fp64"
  int64_t context = 0;             // max_position_embeddings
  std::vector<std::string> files;  // paths
  std::vector<std::string> notes;  // what a user of the folder should know; usually empty
};

// Streams the checkpoint, which any number of ranks may have written at any level of optimizer.shard, through one block
// of memory (checkpoint_merge.h). `out` appears complete or not at all. `passed_over` is called with a message for each
// damaged checkpoint. Raises Error(kUsage) if `out` exists or no family can express the model, Error(kInput) for
// damage, and Error(kResource) for a failing disk and after an interruption.
ExportedModel export_model(const ExportOptions& options, const std::function<void(const std::string&)>& passed_over,
                           FileSystem& files = FileSystem::real());

// The family ("llama") as which the run's newest configuration would be exported. Raises Error(kUsage) if none can
// express it.
std::string exported_family(const std::string& run);

// Host memory in bytes that export_model takes at most, beyond what a process needs anyway: one block, and the part of
// it that is rounded at once.
int64_t export_bytes();

}  // namespace annulus
