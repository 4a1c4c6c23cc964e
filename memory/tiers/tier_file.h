// A file without a name that holds what does not fit into memory (transfers.h). Nothing is left of it when its process
// ends, however it ends.
//
// It is read and written past the page cache (O_DIRECT) where the file system can do so: what is kept is read once, and
// the page cache would push out of memory what is needed. Thread safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace annulus {

class TierFile {
 public:
  // Offsets, lengths and addresses of transfers are multiples of this many bytes if direct().
  static constexpr int64_t kBlock = 4096;

  virtual ~TierFile() = default;
  // Makes sure that the disk has room for the first `bytes` bytes. Those that have not been written are zero.
  virtual void reserve(int64_t bytes) = 0;
  virtual void write(int64_t offset, const void* data, int64_t bytes) = 0;
  virtual void read(int64_t offset, void* data, int64_t bytes) = 0;
  virtual bool direct() const = 0;

  // Makes an empty file in `folder`. This and all operations raise Error(kResource) if they fail; it names folder,
  // operation, errno's text and `key`, the key of the configuration for which the file is made.
  static std::unique_ptr<TierFile> in_folder(const std::string& folder, const std::string& key);
  // The bytes that a tensor takes in a file, whose tensors begin at whole blocks.
  static int64_t padded(int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }
};

// Returns the bytes that are free in a folder's file system for this user. Raises Error(kResource), which names `key`,
// if there is no such folder.
int64_t free_bytes_in(const std::string& folder, const std::string& key);

// Whether the folder's file system keeps its files in memory (tmpfs).
bool lies_in_memory(const std::string& folder);

}  // namespace annulus
