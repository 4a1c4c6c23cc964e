// Writing files so that a crash, a full disk or a lost power supply leaves the old content or the new one, whole.
// Used by checkpoints, safetensors, run folders and configuration; tests put a failing FileSystem in the real one's
// place (leveldb's Env is the model). Reading needs none of this: readers map or read files and check what they find.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "common/error.h"

namespace annulus {

// A file being written, from its beginning. Destroying it closes it. Not thread-safe.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void write(const void* data, size_t bytes) = 0;
  // On return everything written is on the disk.
  virtual void sync() = 0;
  // Reports what a delayed write (NFS) may only find here.
  virtual void close() = 0;
};

// Every operation raises Error(kResource) that names the path, the operation and the system's reason. Thread-safe.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<OutputFile> create(const std::string& path) = 0;  // truncates what is there
  virtual void rename(const std::string& from, const std::string& to) = 0;
  // On return files created in, renamed into or removed from the folder are so on the disk.
  virtual void sync_folder(const std::string& path) = 0;
  virtual void make_folder(const std::string& path) = 0;  // its parent exists; no error when it exists itself
  virtual void remove_all(const std::string& path) = 0;   // no error when there is nothing

  static FileSystem& real();
};

// "path.tmp-PID": beside `path`, on the same disk. A later writer may remove what a crash left there.
std::string temporary_beside(const std::string& path);

// Replaces the file `path`: `write` makes a whole, synced file at the path it is given, which is renamed, and the
// folder synced. When it fails, `path` is as it was and nothing is left beside it. A link is followed. Raises
// Error(kUsage) when `path` is there and no regular file: a rename would put a file in a device's place.
void replace_file(FileSystem& files, const std::string& path,
                  const std::function<void(const std::string& beside)>& write);

// The same with this content.
void write_atomically(FileSystem& files, const std::string& path, std::string_view content);

// The kind of an error of the system's, for what is read: kInput where it is not there or not what it should be
// (ENOENT, ENOTDIR, EISDIR, ELOOP; 0: the file was too short), kResource where it is but may not or cannot be read
// (EACCES, EIO, EMFILE). What cannot be written is kResource, whatever the reason.
ErrorKind kind_of_errno(int error);

// Refuses a file to be written as early as that can be known: Error(kUsage) where `path` is there and no regular file,
// Error(kResource) where its folder is not there or may not be written. `named`: the option and the path, as typed.
void require_output(std::string_view room, const std::string& named, const std::string& path);

// The content of a file that is small by its nature. Raises Error(kInput) where it is missing or has more than `most`
// bytes, Error(kResource) where it cannot be read.
std::string read_small_file(std::string_view room, const std::string& path, size_t most = size_t{16} << 20);

// Whether both paths lead to the same file, which need not exist yet.
bool same_file(const std::string& a, const std::string& b);

// The folder a path lies in ("." for a bare name).
std::string folder_of(const std::string& path);

}  // namespace annulus
