// Reads and writes safetensors files: the little-endian length of a JSON header, the header, and the bytes of the
// tensors without gaps. Used by checkpoints, block maps, Hugging Face weights, attend and others. Files are untrusted:
// all sizes are checked against the file before allocation.
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
  uint64_t offset;  // of its first byte in the file
  uint64_t bytes;
};

// An open file with a validated header. Thread safe.
class SafetensorsFile {
 public:
  // Raises Error(kInput), which names the path, if the file is missing, truncated or has trailing bytes, if its header
  // is malformed, names a tensor twice or has an unknown dtype, or if sizes differ from those of shape and dtype,
  // overlap or leave gaps; Error(kResource) for I/O errors.
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // Returns the tensors in file order.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  const TensorInfo* find(std::string_view name) const;  // null if there is none
  // Loads a tensor as a contiguous CPU tensor with its own memory. Raises Error(kInput) if there is none of this name
  // (the message suggests the nearest) or the file has changed, and Error(kResource) if memory is insufficient.
  at::Tensor load(std::string_view name) const;
  // Copies bytes [begin, begin + bytes) of one of tensors() to `to`. Raises Error(kInternal) if they are not within the
  // tensor, and Error(kInput) if the file has changed.
  void read(const TensorInfo& tensor, uint64_t begin, uint64_t bytes, void* to) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // Returns the first bytes of the file, the length and the header; a checksum of the header covers both.
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

// Replaces `path` atomically (replace_file, common/files.h) by a file of these tensors, of any strides and device,
// which are copied to the CPU one by one. Raises Error(kInput) for an unsupported dtype or a duplicate name, and
// Error(kResource) for I/O errors.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {}, FileSystem& files = FileSystem::real());

// Writes a file incrementally, directly to `path`. The caller syncs the folder, and removes the file after a failure.
// Used by checkpoints. Not thread safe.
class SafetensorsWriter {
 public:
  // Writes the header. Only name, dtype and shape of `tensors` are used. Raises as write_safetensors does.
  SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                    const std::map<std::string, std::string>& metadata, FileSystem& files);

  // Returns the tensors with their offsets, in file order, in which write() must get their bytes.
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

// Returns "F32", "BF16", ...; raises Error(kInput) for an unsupported dtype.
std::string_view safetensors_dtype(at::ScalarType dtype);
// Returns the dtype of such a name, or nullopt if it is unknown.
std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name);

}  // namespace annulus
