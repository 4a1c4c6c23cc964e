// The manifest of a checkpoint (docs/reference/formats.md): its tensors, the file of each range of them, and the
// checksum of each block. Version 2 is written; version 1, with each whole tensor in one file, can be read as well.
// Used by the checkpoint code of this folder, runtime/huggingface/ and runtime/inference/inspection.cc.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// The default size of a block, the unit of checksums.
constexpr int64_t kBlockBytes = int64_t{16} << 20;

// Tensors whose names begin with "optimizer." are in separate files, so that the model can be distributed without them.
enum class CheckpointPart { kAll, kModel };
bool is_optimizer(std::string_view tensor);

// Elements [begin, end) of a tensor in row-major order, in one file.
struct ManifestSlice {
  std::string file;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<std::string> blocks;  // the XXH3-128 of each block
};

struct ManifestTensor {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;
  std::vector<ManifestSlice> slices;  // by begin

  int64_t elements() const;
  int64_t bytes() const;
};

struct ManifestFile {
  uint64_t bytes = 0;
  std::string header_checksum;
};

struct Manifest {
  int64_t version = 2;
  int64_t step = 0;
  int64_t world = 1;  // of the writing job
  int64_t block_bytes = kBlockBytes;
  std::map<std::string, std::string> extra;
  std::map<std::string, std::string> model;
  std::vector<ManifestTensor> tensors;  // by name
  std::map<std::string, ManifestFile> files;

  const ManifestTensor* find(std::string_view tensor) const;  // null if missing
  // Returns the number of elements in a block of this tensor; the last block of a slice may have fewer.
  int64_t block_elements(const ManifestTensor& tensor) const;
};

// Returns the name of a slice in its file: the tensor's name if it is the whole tensor, else NAME[begin:end].
std::string stored_name(const ManifestTensor& tensor, const ManifestSlice& slice);
// Returns the shape of a slice in its file: the tensor's, or [elements] for a part of it.
std::vector<int64_t> stored_shape(const ManifestTensor& tensor, const ManifestSlice& slice);

// Reads FOLDER/manifest.json and checks its checksum, ranges, blocks and file names, without accessing the files.
// Raises Error(kInput) if it is damaged or missing, Error(kResource) if it cannot be read.
Manifest read_manifest(const std::string& folder);

// Returns the content of manifest.json. Raises Error(kInternal) if a string is not UTF-8.
std::string manifest_text(const Manifest& manifest);

// Serializes the `tensors` and `files` that one rank has written, for rank 0.
std::string manifest_part_text(const Manifest& manifest);
// Merges such texts of all ranks, in rank order, into `manifest`. Raises Error(kInternal) if they disagree about a
// tensor, or if an element of a tensor is in no slice or in several.
void join_parts(const std::vector<std::string>& parts, Manifest& manifest);

// ---- Errors and sizes, for code that reads a checkpoint's files.

// Raises Error(kInput): the checkpoint is damaged and skipped for this reason.
[[noreturn]] void checkpoint_damaged(const std::string& path, const std::string& message);
// Returns the size of a file after opening it once. Raises an error if that fails: Error(kInput), damage, for a missing
// file; Error(kResource) for a file that may be intact (permissions, I/O errors), so that the checkpoint is not
// skipped.
uint64_t readable_size(const std::string& path);

}  // namespace annulus
