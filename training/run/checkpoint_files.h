// Writing and reading the slices of a checkpoint, block by block: neither holds more than a block besides what it is
// given. Used by CheckpointStore and the merging of checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/files.h"
#include "tensor_files/safetensors.h"
#include "training/run/checkpoint_manifest.h"
#include "training/run/tensor_slice.h"

namespace annulus {

// Writes these slices to FOLDER/name and syncs it; adds what was written to the manifest, with checksums of what was to
// be written.
void write_slices(const std::string& folder, const std::string& name, const std::vector<const TensorSlice*>& slices,
                  FileSystem& files, Manifest& manifest);

// One checkpoint's files. The manifest must outlive it. Not thread-safe.
class CheckpointReader {
 public:
  CheckpointReader(std::string folder, const Manifest& manifest);

  // Looks at the part's share `rank` of `ranks`: sizes and headers of files, checksums of blocks, about as many bytes
  // for each. All shares together are everything. Raises Error(kInput) that names what is damaged, Error(kResource) for
  // what cannot be read. With `damage`, the first is added there, one line each, and the rest is looked at.
  void check(CheckpointPart part, int rank, int ranks, std::vector<std::string>* damage = nullptr);

  // Calls `sink` with elements [begin, end) of a tensor in order, piece by piece, from blocks whose checksums are
  // right; raises otherwise as check() does. A block of more than kBlockBytes (version 1 has a block a tensor) is
  // handed on in pieces, the last of them when all are right.
  using Sink = std::function<void(int64_t begin, int64_t end, const void* data)>;
  void read(const ManifestTensor& tensor, int64_t begin, int64_t end, const Sink& sink);

 private:
  const SafetensorsFile& open(const std::string& name);
  void read_block(const ManifestTensor& tensor, const ManifestSlice& slice, size_t block, int64_t begin, int64_t end,
                  const Sink& sink);

  std::string folder_;
  const Manifest& manifest_;
  std::map<std::string, size_t> slices_in_;  // of each file
  std::string open_name_;
  std::optional<SafetensorsFile> open_file_;
  std::vector<unsigned char> buffer_;
};

}  // namespace annulus
