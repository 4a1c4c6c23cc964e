// Maps a file into memory for reading. Used for token shards and row indexes that are larger than memory
// (runtime/data/). If the file has become shorter or the disk fails, reading raises an Error instead of the signal
// SIGBUS that a plain map causes.
//
// The first MappedFile of a process installs a handler of SIGBUS. A SIGBUS that these copies did not cause goes to the
// handler that was installed before.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace annulus {

// The identity, size and time of modification of a file, to find out later whether it has been written to.
class FileState {
 public:
  FileState() = default;
  // The state of an open file. Raises an Error of the kind kind_of_errno() (common/files.h) if it cannot be read, and
  // Error(kInput) if it is not a regular file. room and path: for the error.
  FileState(int descriptor, std::string_view room, const std::string& path);

  // In bytes.
  int64_t size() const { return size_; }
  // Raises Error(kInput) if the same file is still at `path` and has another size or time of modification. It raises
  // nothing if the file was removed or replaced by a rename, because the file of this state is then unchanged.
  void require_unchanged(std::string_view room, const std::string& path) const;

  friend bool operator==(const FileState&, const FileState&) = default;

 private:
  uint64_t device_ = 0, inode_ = 0;
  int64_t size_ = 0;
  int64_t seconds_ = 0, nanoseconds_ = 0;  // the time of the last modification
};

// A mapped file. Thread safe after construction. The descriptor is closed at once, so that thousands of files may be
// mapped. Only the pages that are copied are read from the disk, without read-ahead.
class MappedFile {
 public:
  // room: the room of the errors. Raises an Error of the kind kind_of_errno() (common/files.h) if the file cannot be
  // opened, Error(kInput) if it is not a regular file, Error(kResource) if it cannot be mapped.
  MappedFile(std::string_view room, std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return state_.size(); }

  // Copies the bytes [offset, offset + count) to `to`. Raises Error(kInternal) if they are not within the file. If they
  // cannot be read, raises Error(kInput) if the file has changed (it may have become shorter), otherwise
  // Error(kResource).
  void copy(int64_t offset, int64_t count, void* to) const;

  // The value at a byte offset, which may have any alignment. Raises as copy() does.
  template <typename T>
  T at(int64_t offset) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    copy(offset, sizeof value, &value);
    return value;
  }

  // Raises Error(kInput) if the file was written to since it was mapped. It costs one call of stat. Call it after each
  // read whose content must be that of the file when it was opened.
  void require_unchanged() const { state_.require_unchanged(room_, path_); }

  // Advises the system to begin reading a range that will soon be copied in parts.
  void will_need(int64_t offset, int64_t count) const;

 private:
  std::string room_, path_;
  FileState state_;
  const char* data_ = nullptr;
};

}  // namespace annulus
