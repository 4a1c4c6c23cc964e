// See safetensors.h.
#include "runtime/tensor_files/safetensors.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "common/checked_json.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "common/trace/beat.h"

namespace annulus {
namespace {

using Json = nlohmann::json;

// The format's own limit on the header (huggingface/safetensors, MAX_HEADER_SIZE).
constexpr uint64_t kLargestHeader = 100'000'000;
constexpr size_t kMostDimensions = 64;
constexpr uint64_t kLengthBytes = 8;
constexpr std::string_view kMetadata = "__metadata__";

struct DtypeName {
  std::string_view name;
  at::ScalarType dtype;
  uint64_t size;
};

constexpr DtypeName kDtypes[] = {
    {"F64", at::kDouble, 8},    {"I64", at::kLong, 8}, {"F32", at::kFloat, 4}, {"I32", at::kInt, 4},
    {"BF16", at::kBFloat16, 2}, {"F16", at::kHalf, 2}, {"U8", at::kByte, 1},   {"BOOL", at::kBool, 1},
};

[[noreturn]] void refuse(const std::string& path, const std::string& message) {
  throw Error(ErrorKind::kInput, "safetensors", path + ": " + message);
}

const DtypeName* find_dtype(at::ScalarType dtype) {
  for (const DtypeName& d : kDtypes) {
    if (d.dtype == dtype) return &d;
  }
  return nullptr;
}

const DtypeName& dtype_entry(at::ScalarType dtype, const std::string& name) {
  if (const DtypeName* found = find_dtype(dtype)) return *found;
  throw Error(ErrorKind::kInput, "safetensors",
              "tensor \"" + name + "\": the format has no " + c10::toString(dtype) +
                  "; it has F64, F32, F16, BF16, I64, I32, U8 and BOOL");
}

// Raises the error for a file that the system refuses to read.
[[noreturn]] void unreadable(const std::string& path, const char* what, int reason) {
  throw Error(kind_of_errno(reason), "safetensors", path + ": " + what + ": " + std::strerror(reason));
}

std::string shown(std::string_view name) { return shown_name(name); }

// The header has three levels: tensor name -> {"shape": [..]}.
Json parse_json(const std::string& path, std::string_view text) {
  try {
    return parse_bounded_json(text, 3);
  } catch (const JsonRefused& refused) {
    refuse(path, std::string("malformed header: ") + refused.what());
  }
}

uint64_t as_size(const std::string& path, const std::string& name, const Json& value, std::string_view what) {
  if (!value.is_number_unsigned()) {
    refuse(path, "tensor " + shown(name) + ": " + std::string(what) + " must be whole numbers of at least 0");
  }
  return value.get<uint64_t>();
}

// Checks everything about one tensor that does not depend on the others. The file has `data_bytes` of data.
TensorInfo parse_tensor(const std::string& path, const std::string& name, const Json& entry, uint64_t data_bytes) {
  const auto fail = [&](const std::string& message) { refuse(path, "tensor " + shown(name) + ": " + message); };
  if (!entry.is_object()) fail("expected {\"dtype\", \"shape\", \"data_offsets\"}");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) fail(std::string("\"") + key + "\" is missing");
  }
  if (entry.size() != 3) fail("it has keys other than dtype, shape and data_offsets");
  TensorInfo info;
  info.name = name;
  const Json& dtype = entry["dtype"];
  if (!dtype.is_string()) fail("dtype must be a string");
  const auto known = dtype_of_safetensors(dtype.get_ref<const std::string&>());
  if (!known)
    fail("dtype " + shown(dtype.get_ref<const std::string&>()) + " is not one of F64 F32 F16 BF16 I64 I32 U8 BOOL");
  info.dtype = *known;
  const Json& shape = entry["shape"];
  if (!shape.is_array()) fail("shape must be a list");
  if (shape.size() > kMostDimensions)
    fail("it has " + std::to_string(shape.size()) + " dimensions; at most 64 are read");
  // Extents of zero are left out of the product, so that [2^62, 2^62, 0] is refused as well.
  uint64_t elements = 1;
  bool empty = false;
  for (const Json& extent : shape) {
    const uint64_t n = as_size(path, name, extent, "the extents of its shape");
    if (n > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) fail("its shape is too large");
    info.shape.push_back(static_cast<int64_t>(n));
    if (n == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(elements, n, &elements)) {
      fail("its shape is too large");
    }
  }
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(elements, find_dtype(*known)->size, &bytes) ||
      bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    fail("its shape is too large");
  }
  if (empty) bytes = 0;
  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail("data_offsets must be [begin, end]");
  const uint64_t begin = as_size(path, name, offsets[0], "data_offsets");
  const uint64_t end = as_size(path, name, offsets[1], "data_offsets");
  if (begin > end || end > data_bytes) {
    fail("its data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "] are outside of the file's " +
         counted(data_bytes, "byte") + " of data: the file is truncated or damaged");
  }
  if (end - begin != bytes) {
    fail("its shape and dtype need " + counted(bytes, "byte") + ", but its data_offsets hold " +
         std::to_string(end - begin));
  }
  info.offset = begin;
  info.bytes = bytes;
  return info;
}

}  // namespace

std::string_view safetensors_dtype(at::ScalarType dtype) { return dtype_entry(dtype, "").name; }

std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name) {
  for (const DtypeName& d : kDtypes) {
    if (d.name == name) return d.dtype;
  }
  return std::nullopt;
}

// O_NONBLOCK, so that opening a named pipe does not wait for a writer.
SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (fd_ < 0) unreadable(path, "cannot be opened", errno);
  struct stat status {};
  if (::fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) refuse(path, "is not a regular file");
  parse_header(static_cast<uint64_t>(status.st_size));
}

void SafetensorsFile::parse_header(uint64_t file_bytes) {
  if (file_bytes < kLengthBytes) refuse(path_, "is not a safetensors file: it has only " + counted(file_bytes, "byte"));
  unsigned char length_bytes[kLengthBytes];
  read_at(length_bytes, kLengthBytes, 0);
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = length << 8 | length_bytes[i];
  if (length > kLargestHeader) {
    refuse(path_, "is not a safetensors file: its header would have " + counted(length, "byte") +
                      ", but the format allows " + std::to_string(kLargestHeader));
  }
  if (length > file_bytes - kLengthBytes) {
    refuse(path_, "truncated: its header has " + counted(length, "byte") + ", but the whole file has " +
                      counted(file_bytes, "byte"));
  }
  header_.resize(kLengthBytes + length);
  read_at(header_.data(), header_.size(), 0);
  const uint64_t data_bytes = file_bytes - header_.size();
  const std::string_view text = std::string_view(header_).substr(kLengthBytes);
  if (text.empty() || text[0] != '{') refuse(path_, "malformed header: it does not begin with '{'");
  const Json header = parse_json(path_, text);
  if (!header.is_object()) refuse(path_, "malformed header: it is not a JSON object");
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadata) {
      tensors_.push_back(parse_tensor(path_, name, entry, data_bytes));
      continue;
    }
    if (!entry.is_object()) refuse(path_, "malformed header: __metadata__ is not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse(path_, "malformed header: __metadata__ may only hold strings");
      metadata_[key] = value.get<std::string>();
    }
  }
  // Tensors are sorted by offset; an empty tensor comes before another that begins at the same byte.
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  uint64_t at = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    TensorInfo& info = tensors_[i];
    if (info.offset != at) {
      refuse(path_, "tensor " + shown(info.name) + ": begins at byte " + std::to_string(info.offset) +
                        " of the data where byte " + std::to_string(at) +
                        " was expected: tensors overlap or leave a gap");
    }
    at += info.bytes;
    info.offset += header_.size();
    index_.emplace(info.name, i);
  }
  if (at != data_bytes) {
    refuse(path_, "has " + counted(data_bytes, "byte") + " of data, but its tensors have " + std::to_string(at));
  }
}

void SafetensorsFile::read_at(void* to, uint64_t bytes, uint64_t offset) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_, at, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) unreadable(path_, "cannot be read", errno);
    if (n == 0) refuse(path_, "became shorter while it was read");
    at += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(std::string(name));
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

at::Tensor SafetensorsFile::load(std::string_view name) const {
  const TensorInfo* info = find(name);
  if (!info) {
    std::vector<std::string> names;
    for (const TensorInfo& t : tensors_) names.push_back(t.name);
    const std::string near = nearest(name, names);
    refuse(path_, "has no tensor " + shown(name) + (near.empty() ? "" : "; did you mean " + shown(near) + "?"));
  }
  at::Tensor tensor;
  try {
    tensor = at::empty(info->shape, at::TensorOptions().dtype(info->dtype));
  } catch (const c10::Error& error) {
    throw Error(ErrorKind::kResource, "safetensors",
                path_ + ": no memory for tensor " + shown(name) + " of " + counted(info->bytes, "byte"));
  }
  read(*info, 0, info->bytes, tensor.data_ptr());
  return tensor;
}

void SafetensorsFile::read(const TensorInfo& tensor, uint64_t begin, uint64_t bytes, void* to) const {
  if (begin > tensor.bytes || bytes > tensor.bytes - begin) {
    throw Error(ErrorKind::kInternal, "safetensors",
                path_ + ": tensor " + shown(tensor.name) + " has " + counted(tensor.bytes, "byte") + ", but " +
                    std::to_string(bytes) + " from byte " + std::to_string(begin) + " on were requested");
  }
  read_at(to, bytes, tensor.offset + begin);
  beat();
  // Reading a byte other than 0 and 1 as a bool is undefined behaviour.
  if (tensor.dtype == at::kBool) {
    const auto* at = static_cast<const unsigned char*>(to);
    if (std::any_of(at, at + bytes, [](unsigned char c) { return c > 1; })) {
      refuse(path_, "tensor " + shown(tensor.name) + ": it holds truth values other than 0 and 1");
    }
  }
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorInfo> tensors,
                                     const std::map<std::string, std::string>& metadata, FileSystem& files)
    : path_(path), tensors_(std::move(tensors)) {
  std::unordered_set<std::string_view> names;
  for (const TensorInfo& t : tensors_) {
    if (t.name == kMetadata) refuse(path, "a tensor cannot have the name __metadata__");
    if (!names.insert(t.name).second) refuse(path, "two tensors have the name " + shown(t.name));
  }
  // Wide elements come first, so that every tensor is aligned; then tensors are sorted by name, like the format's own
  // writer does.
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    const uint64_t size_a = dtype_entry(a.dtype, a.name).size;
    const uint64_t size_b = dtype_entry(b.dtype, b.name).size;
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  Json header = Json::object();
  if (!metadata.empty()) header[std::string(kMetadata)] = metadata;
  for (TensorInfo& t : tensors_) {
    const DtypeName& dtype = dtype_entry(t.dtype, t.name);
    t.offset = data_bytes_;
    t.bytes = dtype.size;
    for (const int64_t extent : t.shape) t.bytes *= static_cast<uint64_t>(extent);
    data_bytes_ += t.bytes;
    header[t.name] = {{"dtype", dtype.name}, {"shape", t.shape}, {"data_offsets", {t.offset, data_bytes_}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception& error) {
    refuse(path, std::string("a name or metadata is not UTF-8: ") + error.what());
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kLargestHeader) refuse(path, "the header would be larger than the format allows: too many tensors");
  header_.assign(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) header_[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  header_ += text;
  for (TensorInfo& t : tensors_) t.offset += header_.size();
  file_ = files.create(path);
  file_->write(header_.data(), header_.size());
}

void SafetensorsWriter::write(const void* data, uint64_t bytes) {
  written_ += bytes;
  file_->write(data, bytes);
  beat();
}

void SafetensorsWriter::finish() {
  if (written_ != data_bytes_) {
    throw Error(ErrorKind::kInternal, "safetensors",
                path_ + ": " + counted(written_, "byte") + " of tensors were written, but its header declares " +
                    std::to_string(data_bytes_));
  }
  file_->sync();
  file_->close();
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata, FileSystem& files) {
  std::vector<TensorInfo> infos;
  std::unordered_map<std::string_view, const at::Tensor*> by_name;
  for (const NamedTensor& t : tensors) {
    if (!t.tensor.defined())
      throw Error(ErrorKind::kInternal, "safetensors", "tensor " + shown(t.name) + " is undefined");
    infos.push_back({t.name, t.tensor.scalar_type(), t.tensor.sizes().vec(), 0, 0});
    by_name[t.name] = &t.tensor;
  }
  replace_file(files, path, [&](const std::string& beside) {
    SafetensorsWriter writer(beside, infos, metadata, files);
    for (const TensorInfo& info : writer.tensors()) {
      const at::Tensor tensor = by_name.at(info.name)->detach().to(at::kCPU).contiguous();
      writer.write(tensor.const_data_ptr(), info.bytes);
    }
    writer.finish();
  });
}

}  // namespace annulus
