// A file as memory, for reading: token shards and row indices that are larger than memory (data/). What a plain map
// answers with SIGBUS (the file has become shorter, the disk fails) is an Error here.
//
// The first MappedFile of a process installs a handler of SIGBUS. Faults outside of these copies go to the handler that
// was there before.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace annulus {

// Which file lies at a path, and in which state: to find out later that it has been written to.
class FileState {
 public:
  FileState() = default;
  // Of an open file. Raises Error (kind_of_errno).
  FileState(int descriptor, std::string_view room, const std::string& path);

  int64_t size() const { return size_; }
  // Raises Error(kInput) where the same file is still at `path` and has another size or time of modification. A file
  // that was removed, or replaced by a rename, is no change of the one that this is the state of.
  void require_unchanged(std::string_view room, const std::string& path) const;

  friend bool operator==(const FileState&, const FileState&) = default;

 private:
  uint64_t device_ = 0, inode_ = 0;
  int64_t size_ = 0;
  int64_t seconds_ = 0, nanoseconds_ = 0;  // of the last modification
};

// Thread-safe after construction. The descriptor is closed at once, so that thousands of files may be mapped. What is
// read of the disk is what is copied, without what may lie behind it.
class MappedFile {
 public:
  // room: of the errors. Raises Error (kind_of_errno) where the file cannot be opened or mapped, or is no regular file.
  MappedFile(std::string_view room, std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  int64_t size() const { return state_.size(); }

  // Bytes [offset, offset + count). Raises Error(kInternal) where they are not within the file, Error(kInput) where
  // they cannot be read (the file was cut since), always instead of a signal.
  void copy(int64_t offset, int64_t count, void* to) const;

  // The value at a byte offset of any alignment. As copy().
  template <typename T>
  T at(int64_t offset) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    copy(offset, sizeof value, &value);
    return value;
  }

  // Raises Error(kInput) where the file was written to since it was mapped. One call of stat: ask after each read whose
  // content must be that of the file when it was opened.
  void require_unchanged() const { state_.require_unchanged(room_, path_); }

  // Lets the system begin to read a range that will be copied soon, in parts. Advice alone.
  void will_need(int64_t offset, int64_t count) const;

 private:
  std::string room_, path_;
  FileState state_;
  const char* data_ = nullptr;
};

}  // namespace annulus
