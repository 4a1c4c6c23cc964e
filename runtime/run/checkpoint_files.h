// Writes and reads the slices of a checkpoint block by block, with memory for only one block. Used by checkpoint.cc,
// checkpoint_save.cc, checkpoint_merge.cc and the subcommand `checkpoint`.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"
#include "runtime/run/checkpoint_manifest.h"
#include "runtime/run/tensor_slice.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {

// Raises Error(kInternal) if the elements of a slice are not a contiguous vector within its tensor.
void check_slice(const TensorSlice& slice);

// A file of a checkpoint that is being written. Not thread safe.
class SlicesFile {
 public:
  // Writes these slices to FOLDER/name, in blocks of `block_bytes`. Checksums are computed from memory before the
  // write, so they detect disk errors. Calls `before_block` before each block; what it raises ends the writing.
  SlicesFile(const std::string& folder, std::string name, const std::vector<TensorSlice>& slices, FileSystem& files,
             int64_t block_bytes, const std::function<void()>& before_block);
  // Syncs and closes the file, and adds it and its slices to the manifest.
  void finish(Manifest& manifest);

 private:
  std::string name_;
  std::vector<ManifestTensor> tensors_;
  std::optional<SafetensorsWriter> writer_;
};

// Returns the manifest of a checkpoint. Raises Error(kInput) if it is not that of this step.
Manifest manifest_of_step(const std::string& folder, int64_t step);
// The same, after it has verified share `rank` of `ranks` of the checkpoint, as CheckpointReader::check() does.
Manifest verified_manifest(const std::string& folder, int64_t step, CheckpointPart part, int rank, int ranks);
// Verifies only the sizes of the files, which needs no reading of their contents. Raises Error(kInput).
void verify_sizes(const std::string& folder);

// Reads the files of one checkpoint. The manifest must outlive it. Not thread safe.
class CheckpointReader {
 public:
  CheckpointReader(std::string folder, const Manifest& manifest);

  // Verifies share `rank` of `ranks` of a part of the checkpoint: the sizes and headers of files, and the checksums of
  // blocks. Shares have about equal bytes and cover the part. Raises Error(kInput), which describes the damage, and
  // Error(kResource) for I/O errors. With `damage`, appends damage there, one line each, and continues.
  void check(CheckpointPart part, int rank, int ranks, std::vector<std::string>* damage = nullptr);

  // Calls `sink` with elements [begin, end) of a tensor in order and in pieces, from verified blocks; raises as check()
  // does for damage. A block of more than kBlockBytes (in version 1 each tensor is one block) is passed in several
  // pieces, of which only the last is delayed until the checksum is verified.
  using Sink = std::function<void(int64_t begin, int64_t end, const void* data)>;
  void read(const ManifestTensor& tensor, int64_t begin, int64_t end, const Sink& sink);

 private:
  const SafetensorsFile& open(const std::string& name);
  void read_block(const ManifestTensor& tensor, const ManifestSlice& slice, size_t block, int64_t begin, int64_t end,
                  const Sink& sink);

  std::string folder_;
  const Manifest& manifest_;
  std::map<std::string, size_t> slices_in_;  // the number in each file
  std::string open_name_;
  std::optional<SafetensorsFile> open_file_;
  std::vector<unsigned char> buffer_;
};

}  // namespace annulus
