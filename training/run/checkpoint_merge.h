// The weights of a checkpoint, whoever wrote it, as safetensors that other programs read. Used by the verb
// `checkpoint`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"
#include "training/run/checkpoint_manifest.h"

namespace annulus {

// Writes the model's tensors of the checkpoint in `folder` to `out`: one file; or, with `max_file_bytes`, a new folder
// in Hugging Face's layout: files of at most so many bytes of tensors (a larger tensor has one of its own) with
// model.safetensors.index.json, or model.safetensors alone where one takes all. Every block that is read is checked; no
// more than one is held. Written beside, synced and renamed. Returns the paths of the files.
//
// Raises Error(kUsage) where `out` is there, Error(kInput) for damage, Error(kResource) for a disk or a permission and
// after an interruption (interrupt.h); nothing is left then.
std::vector<std::string> merge_checkpoint(const std::string& folder, const Manifest& manifest, const std::string& out,
                                          std::optional<int64_t> max_file_bytes,
                                          FileSystem& files = FileSystem::real());

}  // namespace annulus
