// See text_source.h.
#include "data/text_source.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "common/checksum.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "data/find_files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kInMemory = int64_t{256} << 20;
// Longer texts are fingerprinted by this many evenly spaced blocks.
constexpr int64_t kFingerprintAll = int64_t{1} << 30;
constexpr int64_t kFingerprintBlocks = 1024;
constexpr int64_t kBlock = int64_t{1} << 20;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kInput, "data", message); }

// A file that cannot be read, for the system's reason.
[[noreturn]] void unreadable(const std::string& path, int reason) {
  throw Error(kind_of_errno(reason), "data", "data.train: " + path + " cannot be read: " + std::strerror(reason));
}

}  // namespace

// The text as a sequence of files, in memory or not.
struct TextSource::Files {
  std::vector<std::string> paths;
  std::vector<int64_t> ends;  // ends[i]: where file i ends in the text
  std::string memory;         // the whole text, where it is short

  // The text's bytes [offset, offset + count). Thread-safe: files are opened anew.
  void read(int64_t offset, int64_t count, char* to) const {
    if (!memory.empty()) {
      std::memcpy(to, memory.data() + offset, static_cast<size_t>(count));
      return;
    }
    read_files(offset, count, to);
  }

  void read_files(int64_t offset, int64_t count, char* to) const {
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), offset) - ends.begin());
    while (count > 0) {
      const int64_t begin = i == 0 ? 0 : ends[i - 1];
      const int64_t n = std::min(count, ends[i] - offset);
      if (n > 0) read_file(paths[i], offset - begin, n, to);
      offset += n;
      to += n;
      count -= n;
      ++i;
    }
  }

  static void read_file(const std::string& path, int64_t offset, int64_t count, char* to) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) unreadable(path, errno);
    while (count > 0) {
      const ssize_t n = ::pread(fd, to, static_cast<size_t>(std::min(count, kFingerprintAll)), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        const int reason = errno;
        ::close(fd);
        if (n < 0) unreadable(path, reason);
        refuse("data.train: " + path + " has become shorter since the run began");
      }
      to += n;
      offset += n;
      count -= n;
    }
    ::close(fd);
  }
};

TextSource::TextSource(const DataConfig& data, int64_t seed)
    : files_(std::make_unique<Files>()), seed_(seed), context_(data.context) {
  if (data.context < 1 || data.validation_fraction < 0 || data.validation_fraction >= 1) {
    throw Error(ErrorKind::kInternal, "data", "context and validation_fraction were not checked");
  }
  const int64_t limit = data.max_bytes > 0 ? data.max_bytes : INT64_MAX;
  std::unordered_set<std::string> seen;
  for (const std::string& entry : data.train) {
    for (std::string& path : find_files(entry)) {
      if (bytes_ >= limit) break;
      std::error_code error;
      const fs::path real = fs::canonical(path, error);
      if (!seen.insert(error ? path : real.string()).second) continue;
      const auto size = fs::file_size(path, error);
      if (error) unreadable(path, error.value());
      if (::access(path.c_str(), R_OK) != 0) unreadable(path, errno);
      bytes_ += std::min(static_cast<int64_t>(std::min<uintmax_t>(size, INT64_MAX / 2)), limit - bytes_);
      files_->paths.push_back(std::move(path));
      files_->ends.push_back(bytes_);
    }
  }

  const int64_t row = context_ + 1;
  // The validation part is the tail; rounded so that any fraction above 0 has one.
  const auto validation = static_cast<int64_t>(std::ceil(static_cast<double>(bytes_) * data.validation_fraction));
  train_bytes_ = bytes_ - validation;
  const auto need = [&](int64_t have, const std::string& what, const std::string& hint) {
    if (have >= row) return;
    refuse(what + " has " + with_commas(have) + " bytes, a row needs " + with_commas(row) + " (data.context + 1); " +
           hint);
  };
  const std::string which =
      files_->paths.size() == 1 ? files_->paths[0] : with_commas(files()) + " files of data.train";
  need(bytes_, "the text (" + which + ")", "use more text or a shorter context");
  need(train_bytes_, "the training part of the text (" + which + ", " + with_commas(bytes_) + " bytes)",
       "use more text, a shorter context or a smaller data.validation_fraction");
  if (validation > 0) {
    need(validation, "the validation part of the text (" + which + ", " + with_commas(bytes_) + " bytes)",
         "use more text, a shorter context, a larger data.validation_fraction, or 0 for no validation");
  }

  if (bytes_ <= kInMemory) {
    std::string memory(static_cast<size_t>(bytes_), '\0');
    files_->read_files(0, bytes_, memory.data());
    files_->memory = std::move(memory);
  }
  Checksum sum;
  sum.update(files_->ends.data(), files_->ends.size() * sizeof(int64_t));
  if (!files_->memory.empty()) {
    sum.update(files_->memory.data(), files_->memory.size());
  } else {
    const int64_t blocks = bytes_ <= kFingerprintAll ? (bytes_ + kBlock - 1) / kBlock : kFingerprintBlocks;
    std::string block(static_cast<size_t>(kBlock), '\0');
    for (int64_t i = 0; i < blocks; ++i) {
      // The first and the last block are always among them.
      const int64_t begin = bytes_ <= kFingerprintAll
                                ? i * kBlock
                                : static_cast<int64_t>(static_cast<__int128>(bytes_ - kBlock) * i / (blocks - 1));
      const int64_t n = std::min(kBlock, bytes_ - begin);
      files_->read_files(begin, n, block.data());
      sum.update(block.data(), static_cast<size_t>(n));
    }
  }
  fingerprint_ = sum.hex();
}

TextSource::~TextSource() = default;

int64_t TextSource::files() const { return static_cast<int64_t>(files_->paths.size()); }

std::string TextSource::text() const {
  return with_commas(files()) + (files() == 1 ? " file, " : " files, ") + with_commas(bytes_) + " bytes (" +
         with_commas(bytes_ - train_bytes_) + " for validation)";
}

at::Tensor TextSource::row_at(int64_t offset) const {
  const int64_t n = context_ + 1;
  std::string bytes(static_cast<size_t>(n), '\0');
  files_->read(offset, n, bytes.data());
  at::Tensor row = at::empty({n}, at::TensorOptions().dtype(at::kLong));
  std::transform(bytes.begin(), bytes.end(), row.data_ptr<int64_t>(),
                 [](char c) { return static_cast<unsigned char>(c); });
  return row;
}

std::vector<int64_t> TextSource::documents_at(int64_t offset) const {
  std::vector<int64_t> lengths;
  const int64_t end = offset + context_;
  auto file = std::upper_bound(files_->ends.begin(), files_->ends.end(), offset);
  for (; offset < end; ++file) {
    const int64_t next = std::min(end, *file);
    if (next > offset) lengths.push_back(next - offset);  // a file may be empty
    offset = next;
  }
  return lengths;
}

int64_t TextSource::sample_offset(int64_t step, int64_t row) const {
  // A counter-based choice: any rank can make any row of any step.
  const int64_t key[3] = {seed_, step, row};
  const uint64_t random = hash64(key, sizeof key);
  const auto offsets = static_cast<uint64_t>(train_bytes_ - context_);
  return static_cast<int64_t>(static_cast<unsigned __int128>(random) * offsets >> 64);
}

int64_t TextSource::validation_offset(int64_t i, int64_t rows) const {
  if (!has_validation()) throw Error(ErrorKind::kInternal, "data", "there is no validation part");
  if (i < 0 || i >= rows) throw Error(ErrorKind::kInternal, "data", "validation row out of range");
  const int64_t last = bytes_ - train_bytes_ - (context_ + 1);
  const int64_t steps = std::max<int64_t>(1, rows - 1);
  return train_bytes_ + static_cast<int64_t>(static_cast<__int128>(last) * i / steps);
}

at::Tensor TextSource::sample(int64_t step, int64_t row) const { return row_at(sample_offset(step, row)); }

at::Tensor TextSource::validation_row(int64_t i, int64_t rows) const { return row_at(validation_offset(i, rows)); }

std::vector<int64_t> TextSource::sample_documents(int64_t step, int64_t row) const {
  return documents_at(sample_offset(step, row));
}

std::vector<int64_t> TextSource::validation_documents(int64_t i, int64_t rows) const {
  return documents_at(validation_offset(i, rows));
}

}  // namespace annulus
