// Writes files so that a crash, a full disk or a power failure leaves either the complete old content or the complete
// new content. Used for checkpoints, safetensors, run folders, row indexes and reports. Tests replace the real
// FileSystem by one that fails (the design follows leveldb's Env). Readers do not go through FileSystem: they map or
// read files and validate the content; this file only has their common helpers.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "common/error.h"

namespace annulus {

// A file that is written from its beginning. The destructor closes it. Not thread safe.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void write(const void* data, size_t bytes) = 0;
  // Returns when everything written is on the disk (fsync).
  virtual void sync() = 0;
  // Raises the error of a delayed write, which NFS may report only here.
  virtual void close() = 0;
};

// Every operation raises Error(kResource), which names path, operation and errno's text, if it fails. Thread safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<OutputFile> create(const std::string& path) = 0;  // truncates an existing file
  virtual void rename(const std::string& from, const std::string& to) = 0;
  // Returns when creations, renames and removals in the folder are on the disk as well.
  virtual void sync_folder(const std::string& path) = 0;
  virtual void make_folder(const std::string& path) = 0;  // its parent must exist; the folder may exist already
  virtual void remove_all(const std::string& path) = 0;   // `path` need not exist

  // Returns the file system of this machine.
  static FileSystem& real();
};

// Returns "path.tmp-PID", which is in the folder of `path` and so on the same disk. A later writer may remove such a
// file that a crash left behind.
std::string temporary_beside(const std::string& path);

// Replaces the file `path`. `write` makes a complete, synced file at the path `beside`; that file is renamed to `path`,
// and the folder is synced. On failure `path` is unchanged and no temporary file is left. A symbolic link is followed.
// Raises Error(kUsage) if `path` exists and is not a regular file, because the rename would replace a device.
void replace_file(FileSystem& files, const std::string& path,
                  const std::function<void(const std::string& beside)>& write);

// Replaces the file `path` by one with this content, as replace_file() does.
void write_atomically(FileSystem& files, const std::string& path, std::string_view content);

// Writes all bytes to an open descriptor, and polls a non-blocking one that is full. Returns 0, or the errno of the
// write that failed. Allocates nothing, so it may be called after a fork.
int write_fully(int fd, std::string_view bytes);

// Describes the errno of a failed write and what to do about it: "No space left on device; free some space or write
// elsewhere".
std::string writing_error_text(int error);

// Classifies the errno of a failed read: kInput if the file does not exist or is of the wrong type (such as ENOENT,
// ENOTDIR, EISDIR, ELOOP; 0 if the file was too short), kResource if it exists but cannot be read (such as EACCES, EIO,
// EMFILE). A failed write is always kResource.
ErrorKind kind_of_errno(int error);

// Checks, before any work is done, that a file can be written. Raises Error(kUsage) if `path` exists and is not a
// regular file, Error(kResource) if its folder does not exist or is not writable. named: the option and the path as the
// user typed them.
void require_output(std::string_view module, const std::string& named, const std::string& path);

// Returns the content of a file. Raises Error(kInput) if it does not exist or has more than `most` bytes,
// Error(kResource) if it cannot be read.
std::string read_small_file(std::string_view module, const std::string& path, size_t most = size_t{16} << 20);

// Returns the first line of a file such as those of /proc and /sys, without its line break; "" if there is none.
std::string first_line(const std::string& path);

// Reads everything from a descriptor up to its end, or up to an error.
std::string read_to_end(int fd);

// Returns whether both paths resolve to the same file, which need not exist yet.
bool same_file(const std::string& a, const std::string& b);

// Returns whether there is a regular file at this path; false if the system does not tell.
bool is_file(const std::string& path);

// Returns the folder of a path: "a" for "a/b", "." for "b".
std::string folder_of(const std::string& path);

}  // namespace annulus
