// A run's checkpoint as a folder of Hugging Face's: config.json, weights, tokenizer and generation files. Used by the
// verb `export`.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"

namespace annulus {

struct ExportOptions {
  std::string run;                   // its folder
  std::string out;                   // the new folder
  std::optional<int64_t> step = {};  // of the checkpoint; none: the newest that is whole
  std::string dtype = {};            // "bf16", "fp32"; empty: what the run computes in
  int64_t shard_bytes = 5'000'000'000;
  bool leave_pattern = false;  // ConfigToWrite::leave_pattern
};

struct ExportedModel {
  int64_t step = 0;
  std::string architecture;        // "LlamaForCausalLM"
  std::string dtype;               // "bf16", "fp32"
  int64_t context = 0;             // max_position_embeddings
  std::vector<std::string> files;  // paths
  std::vector<std::string> notes;  // what whoever uses the folder should know, mostly nothing
};

// Streams the checkpoint, written by any number of ranks at any level, through one block of memory
// (checkpoint_merge.h). `out` is whole or not there. `passed_over` is told of damaged checkpoints. Raises Error(kUsage)
// where `out` is there or no family can be the model; Error(kInput) for damage; Error(kResource) for a disk, and after
// an interruption.
ExportedModel export_model(const ExportOptions& options, const std::function<void(const std::string&)>& passed_over,
                           FileSystem& files = FileSystem::real());

// The family ("llama") that the run's newest configuration would be exported as. Raises Error(kUsage) where none can.
std::string exported_family(const std::string& run);

// Bytes of the host that export_model holds at most, but for what a process takes anyway: a block, and what is
// rounded of it at once.
int64_t export_bytes();

}  // namespace annulus
