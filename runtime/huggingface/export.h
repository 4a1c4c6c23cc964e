// Exports a run's checkpoint as a folder in Hugging Face's layout: config.json, weights, tokenizer and generation
// files. Used by the subcommands `export` and `inspect`.
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
  std::optional<int64_t> step = {};  // of the checkpoint; none: the newest intact one
  std::string dtype = {};            // "bf16", "fp32", "fp64"; empty: the run's compute dtype
  int64_t shard_bytes = 5'000'000'000;
  bool leave_pattern = false;  // as ConfigToWrite::leave_pattern
};

struct ExportedModel {
  int64_t step = 0;
  std::string architecture;        // "LlamaForCausalLM"
  std::string dtype;               // "bf16", "fp32", "fp64"
  int64_t context = 0;             // max_position_embeddings
  std::vector<std::string> files;  // paths
  std::vector<std::string> notes;  // caveats for users of the folder; usually empty
};

// Streams the checkpoint, written by any number of ranks at any level of optimizer.shard, through one block of memory
// (checkpoint_merge.h). Creates `out` atomically. Calls `passed_over` with a message for each damaged checkpoint.
// Raises Error(kUsage) if `out` exists or no family can express the model, Error(kInput) for damage, and
// Error(kResource) for I/O errors and after an interruption.
ExportedModel export_model(const ExportOptions& options, const std::function<void(const std::string&)>& passed_over,
                           FileSystem& files = FileSystem::real());

// Returns the family ("llama") of an export of the run's newest configuration. Raises Error(kUsage) if none can express
// it.
std::string exported_family(const std::string& run);

// Returns the peak host memory in bytes of export_model beyond the process's baseline: one block, and the part of it
// that is rounded at once.
int64_t export_bytes();

}  // namespace annulus
