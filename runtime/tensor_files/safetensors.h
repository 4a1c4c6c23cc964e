// Reads and writes safetensors files, which consist of the little-endian length of a JSON header, the header, and the
// bytes of the tensors without gaps. Checkpoints, block maps, Hugging Face weights, attend and others use it. Files are
// not trusted: all sizes are checked against the file before memory is taken.
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

#include "common/descriptor.h"
#include "common/files.h"
#include "runtime/tensor_files/named_tensor.h"

namespace annulus {

struct TensorInfo {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t offset;  // of its first byte from the beginning of the file
  uint64_t bytes;
};

// An open file whose header has been checked in full. Thread-safe.
class SafetensorsFile {
 public:
  // Raises Error(kInput), which names the path, if the file is missing, truncated or has trailing bytes, if its header
  // is malformed, names a tensor twice or has an unknown dtype, or if the tensors' sizes do not fit their shapes and
  // dtypes or their bytes overlap or leave gaps; Error(kResource) if the system cannot read it.
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // The tensors in the order of the file.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // null if there is none
  // Returns a contiguous CPU tensor with its own memory. Raises Error(kInput) if there is no such tensor (with the
  // nearest name) or the file has changed, and Error(kResource) if there is not enough memory.
  at::Tensor load(std::string_view name) const;
  // Copies bytes [begin, begin + bytes) of one of tensors() to `to`. They must lie within the tensor, otherwise it
  // raises Error(kInternal). Raises Error(kInput) if the file has changed.
  void read(const TensorInfo& tensor, uint64_t begin, uint64_t bytes, void* to) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The first bytes of the file, which are the length and the header; a checksum of the header covers both.
  const std::string& header() const { return header_; }

 private:
  void read_at(void* to, uint64_t bytes, uint64_t offset) const;
  void parse_header(uint64_t file_bytes);

  std::string path_;
  const Descriptor fd_;
  std::string header_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Replaces `path` atomically with a file of these tensors, which may have any strides and device and are copied to the
// CPU one by one. The file is written under a temporary name, synced and renamed, and the folder is synced. Raises
// Error(kInput) for a dtype that the format lacks or a name that occurs twice, and Error(kResource) for a full disk or
// a missing permission.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {}, FileSystem& files = FileSystem::real());

// Writes a file of tensors piece by piece, directly into `path`. The caller syncs the folder and removes the file after
// a failure. Checkpoints use it. Not thread-safe.
class SafetensorsWriter {
 public:
  // Writes the header. Only name, dtype and shape of `tensors` are used. Raises as write_safetensors does.
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata, FileSystem& files);

  // The tensors with their offsets, in the order of the file, in which their bytes must be written.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const std::string& header() const { return header_; }  // like SafetensorsFile::header()
  uint64_t file_bytes() const { return header_.size() + data_bytes_; }
  void write(const void* data, uint64_t bytes);
  // Syncs and closes the file. Raises Error(kInternal) if not all bytes have been written.
  void finish();

 private:
  std::string path_;
  std::string header_;
  std::vector<TensorInfo> tensors_;
  uint64_t data_bytes_ = 0;
  uint64_t written_ = 0;
  std::unique_ptr<OutputFile> file_;
};

// Returns "F32", "BF16", ...; raises Error(kInput) for a dtype that the format lacks.
std::string_view safetensors_dtype(at::ScalarType dtype);
// Returns the dtype of such a name, or nothing for a name that is not known here.
std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name);

}  // namespace annulus
