// Writes and reads the slices of a checkpoint block by block, with memory for only one block. Used by CheckpointStore,
// checkpoint_merge.cc and the subcommand `checkpoint`.
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

// Writes these slices to FOLDER/name, syncs the file, and adds them to the manifest. Checksums are computed from memory
// before the write, so they detect disk errors.
void write_slices(const std::string& folder, const std::string& name, const std::vector<const TensorSlice*>& slices,
                  FileSystem& files, Manifest& manifest);

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
