// Maps a file into memory for reading. Used for token shards and row indexes that are larger than memory
// (runtime/data/). If the file was truncated meanwhile or the disk fails, copy() raises an Error, where plain access to
// a mapping would end the process by SIGBUS.
//
// The first MappedFile of a process installs a handler of SIGBUS, which passes any SIGBUS that copy() did not cause on
// to the previous handler.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace annulus {

// The identity, size and modification time of a file, to detect later writes.
class FileState {
 public:
  FileState() = default;
  // Reads the state of an open file. Raises an Error of the kind kind_of_errno() (common/files.h) if that fails, and
  // Error(kInput) if it is not a regular file. module and path: for the error.
  FileState(int descriptor, std::string_view module, const std::string& path);

  // In bytes.
  int64_t size() const { return size_; }
  // Raises Error(kInput) if the same file (inode) is still at `path` and its size or modification time has changed.
  // Removing the file or replacing it by a rename is no error, because the open file is then unchanged.
  void require_unchanged(std::string_view module, const std::string& path) const;

  friend bool operator==(const FileState&, const FileState&) = default;

 private:
  uint64_t device_ = 0, inode_ = 0;
  int64_t size_ = 0;
  int64_t seconds_ = 0, nanoseconds_ = 0;  // the modification time
};

// A mapped file. Thread safe after construction. No descriptor stays open, so thousands of files may be mapped. Only
// the pages that are copied are read from disk, without read-ahead.
class MappedFile {
 public:
  // module: the module of the errors. Raises an Error of the kind kind_of_errno() (common/files.h) if the file cannot
  // be opened, Error(kInput) if it is not a regular file, Error(kResource) if it cannot be mapped.
  MappedFile(std::string_view module, std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return state_.size(); }

  // Copies the bytes [offset, offset + count) to `to`. Raises Error(kInternal) if they are not within the file. If they
  // cannot be read, raises Error(kInput) if the file has changed (it may have become shorter), otherwise
  // Error(kResource).
  void copy(int64_t offset, int64_t count, void* to) const;

  // Returns the value at a byte offset of any alignment. Raises as copy() does.
  template <typename T>
  T at(int64_t offset) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    copy(offset, sizeof value, &value);
    return value;
  }

  // Raises Error(kInput) if the file was written to since it was mapped. Costs one call of stat. Call it after each
  // read that must return the content as of the mapping.
  void require_unchanged() const { state_.require_unchanged(module_, path_); }

  // Advises the kernel to prefetch a range that will soon be copied (MADV_WILLNEED).
  void will_need(int64_t offset, int64_t count) const;

 private:
  std::string module_, path_;
  FileState state_;
  const char* data_ = nullptr;
};

}  // namespace annulus
