// The manifest of a checkpoint (docs/formats.md): which tensors it has, which ranges of them lie in which file, and the
// checksum of each block. Written in version 2; version 1, whose tensors lie whole in one file each, is read, too. Used
// by checkpoint_files, CheckpointStore and the verb `checkpoint`.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace annulus {

// Bytes of a slice that have a checksum of their own, unless the manifest says otherwise.
constexpr int64_t kBlockBytes = int64_t{16} << 20;

// Tensors whose names begin with "optimizer." lie in files of their own, so that the model can be handed on.
enum class CheckpointPart { kAll, kModel };
bool is_optimizer(std::string_view tensor);

// Elements [begin, end) of a tensor in row-major order, in one file.
struct ManifestSlice {
  std::string file;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<std::string> blocks;  // XXH3-128 of each
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
  int64_t world = 1;  // ranks that wrote it
  int64_t block_bytes = kBlockBytes;
  std::map<std::string, std::string> extra;
  std::map<std::string, std::string> model;
  std::vector<ManifestTensor> tensors;  // by name
  std::map<std::string, ManifestFile> files;

  const ManifestTensor* find(std::string_view tensor) const;  // null where there is none
  // Elements of a block of this tensor; its last one may have fewer.
  int64_t block_elements(const ManifestTensor& tensor) const;
};

// What a slice is called in its file: the tensor's name where it is all of it, else NAME[begin:end].
std::string stored_name(const ManifestTensor& tensor, const ManifestSlice& slice);
// The shape that it has there: the tensor's, or its length.
std::vector<int64_t> stored_shape(const ManifestTensor& tensor, const ManifestSlice& slice);

// Reads FOLDER/manifest.json and checks it by itself: checksum, ranges, blocks, names of files. Raises Error(kInput)
// where it is damaged or not there, Error(kResource) where it may not or cannot be read.
Manifest read_manifest(const std::string& folder);

// The text of the file. Raises Error(kInternal) where something in it is no text.
std::string manifest_text(const Manifest& manifest);

// What one rank has written, to be sent to rank 0: `tensors` and `files`.
std::string manifest_part_text(const Manifest& manifest);
// Joins what the ranks have written, in rank order. Raises Error(kInternal) where they disagree about a tensor, or
// where an element of one is in no slice or in several.
void join_parts(const std::vector<std::string>& parts, Manifest& manifest);

// ---- For whoever reads a checkpoint's files.

// Damage: the checkpoint is passed over, with this reason.
[[noreturn]] void checkpoint_damaged(const std::string& path, const std::string& message);
// What cannot be read, for the system's `reason`. What is not there or no file is damage; but what may be whole, behind
// a missing permission or a failing disk, must not be passed over as if it were not.
[[noreturn]] void checkpoint_unreadable(const std::string& path, const std::error_code& reason);
// The size of a file that can be opened.
uint64_t readable_size(const std::string& path);

}  // namespace annulus
