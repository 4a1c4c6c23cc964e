// Merges the weights of a checkpoint, from any number of ranks, into standard safetensors files. Used by the subcommand
// `checkpoint` and export (runtime/huggingface/export.h).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/checkpoint_manifest.h"

namespace annulus {

struct Merging {
  std::string out;         // a file, or with max_file_bytes a folder
  std::string named = {};  // `out` as the user typed it, for messages: "--out merged"
  std::optional<int64_t> max_file_bytes = {};
  std::optional<at::ScalarType> dtype = {};  // to round to; nullopt: that of each tensor
  // For a folder: adds other files before it is renamed to its final name.
  std::function<void(const std::string& folder, FileSystem& files)> add_files = {};
};

// Writes the model's tensors of the checkpoint in `folder` to one file, or, with `max_file_bytes`, to a new folder in
// Hugging Face's layout: files with at most that many bytes of tensors (a larger tensor gets its own file) and
// model.safetensors.index.json, or only model.safetensors if everything fits. Every block is verified, and only one is
// in memory at a time. The output is written under a temporary name, synced and renamed. Returns the paths of the
// files.
//
// Raises Error(kUsage) if `out` exists, Error(kInput) for damage, Error(kResource) for I/O errors and after an
// interruption (common/interrupt.h); it then leaves nothing behind.
std::vector<std::string> merge_checkpoint(const std::string& folder, const Manifest& manifest, const Merging& to,
                                          FileSystem& files = FileSystem::real());

// Calls `use` with each of these checkpoints in turn until a call does not raise Error(kInput), which means damage.
// Calls `passed_over` with the damage of each earlier one; rethrows that of the last one.
void use_newest_whole(const std::vector<CheckpointStore::Entry>& newest_first,
                      const std::function<void(const CheckpointStore::Entry& entry, const Manifest& manifest)>& use,
                      const std::function<void(const std::string& reason)>& passed_over);

}  // namespace annulus
