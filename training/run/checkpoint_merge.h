// The weights of a checkpoint, whoever wrote it, as safetensors that other programs read. Used by the verb
// `checkpoint` and by export (huggingface/export.h).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"
#include "training/run/checkpoint.h"
#include "training/run/checkpoint_manifest.h"

namespace annulus {

struct Merging {
  std::string out;         // a file; with max_file_bytes a folder
  std::string named = {};  // `out` as it was typed, for messages: "--out merged"
  std::optional<int64_t> max_file_bytes = {};
  std::optional<at::ScalarType> dtype = {};  // which values are rounded to; none: their own
  // Of a folder: writes what else is to lie in it, into the one that gets its name at the end.
  std::function<void(const std::string& folder, FileSystem& files)> add_files = {};
};

// Writes the model's tensors of the checkpoint in `folder`: to one file; or, with `max_file_bytes`, to a new folder in
// Hugging Face's layout: files of at most so many bytes of tensors (a larger tensor has one of its own) with
// model.safetensors.index.json, or model.safetensors alone where one takes all. Every block that is read is checked; no
// more than one is held. Written beside, synced and renamed. Returns the paths
// of the files.
//
// Raises Error(kUsage) where `out` is there, Error(kInput) for damage, Error(kResource) for a disk or a permission and
// after an interruption (interrupt.h); nothing is left then.
std::vector<std::string> merge_checkpoint(const std::string& folder, const Manifest& manifest, const Merging& to,
                                          FileSystem& files = FileSystem::real());

// Calls `use` with the first of these that is whole as far as it reads it, and tells those passed over; the last one's
// damage is raised.
void use_newest_whole(const std::vector<CheckpointStore::Entry>& newest_first,
                      const std::function<void(const CheckpointStore::Entry& entry, const Manifest& manifest)>& use,
                      const std::function<void(const std::string& reason)>& passed_over);

}  // namespace annulus
