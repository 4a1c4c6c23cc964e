// Reading and writing safetensors files: little-endian length of a JSON header, the header, the tensors' bytes without
// gaps. Used by checkpoints, attend and sample. A file from outside is never trusted: all sizes are checked against the
// file before memory is taken.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/files.h"
#include "tensor_files/named_tensor.h"

namespace annulus {

struct TensorInfo {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t offset;  // of its first byte, from the beginning of the file
  uint64_t bytes;
};

// An open file whose header has been checked in full. Thread-safe.
class SafetensorsFile {
 public:
  // Raises Error(kInput) with the path: missing, unreadable, truncated, trailing bytes, malformed header, a tensor
  // twice, a dtype not known here, sizes that do not fit shape and dtype, overlapping or missing bytes.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // In the order of the file.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // null where there is none
  // CPU, contiguous, a copy of its own. Raises Error(kInput): no such tensor (the nearest name is given), the file has
  // changed; Error(kResource): no memory.
  at::Tensor load(std::string_view name) const;
  // Bytes [begin, begin + bytes) of one of tensors(), with the same errors. They lie within it.
  void read(const TensorInfo& tensor, uint64_t begin, uint64_t bytes, void* to) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The first bytes of the file, length and header: what a checksum of the header covers.
  const std::string& header() const { return header_; }

 private:
  void read_at(void* to, uint64_t bytes, uint64_t offset) const;
  void parse_header(uint64_t file_bytes);

  std::string path_;
  int fd_ = -1;
  std::string header_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Replaces `path` with a file of these tensors (any strides and device; copied to the CPU one by one). Written beside,
// synced, renamed, the folder synced: when it fails nothing half-written is left. Raises Error(kInput): a dtype that
// the format lacks, a name twice; Error(kResource): disk or permission.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {}, FileSystem& files = FileSystem::real());

// A file of tensors whose bytes come piece by piece, straight into `path`; the folder is the caller's to sync and,
// after a failure, to remove. For checkpoints. Not thread-safe.
class SafetensorsWriter {
 public:
  // Of the tensors, name, dtype and shape are given. Writes the header. Raises as write_safetensors does.
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata, FileSystem& files);

  // In the order of the file, in which their bytes are to be written, with their places.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::string& header() const { return header_; }  // as SafetensorsFile::header()
  uint64_t file_bytes() const { return header_.size() + data_bytes_; }
  void write(const void* data, uint64_t bytes);
  // Synced and closed. All bytes have been written.
  void finish();

 private:
  std::string path_;
  std::string header_;
  std::vector<TensorInfo> tensors_;
  uint64_t data_bytes_ = 0;
  uint64_t written_ = 0;
  std::unique_ptr<OutputFile> file_;
};

// "F32", "BF16", ...; raises Error(kInput) for a dtype that the format lacks.
std::string_view safetensors_dtype(at::ScalarType dtype);
// The dtype of such a name; none where the format has none of this name.
std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name);

}  // namespace annulus
