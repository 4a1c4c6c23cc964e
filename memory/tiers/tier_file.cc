// See tier_file.h.
#include "memory/tiers/tier_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

[[noreturn]] void fail_in(const std::string& folder, const std::string& key, const std::string& what, int error) {
  throw Error(ErrorKind::kResource, "memory",
              key + ": " + what + " a file in " + folder + ": " + std::strerror(error) +
                  "; set memory.files to a folder on a disk with enough room, or " + key + " = \"none\"");
}

class RealTierFile : public TierFile {
 public:
  RealTierFile(const std::string& folder, std::string key) : folder_(folder), key_(std::move(key)) {
    for (const int flag : {O_DIRECT, 0}) {
      fd_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flag, 0600);
      direct_ = flag != 0;
      if (fd_ >= 0 || errno != EINVAL) break;
    }
    if (fd_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {  // no files without a name here
      std::string path = folder + "/.annulus-offload-XXXXXX";
      fd_ = ::mkostemp(path.data(), O_CLOEXEC);
      if (fd_ >= 0) ::unlink(path.c_str());
      direct_ = fd_ >= 0 && ::fcntl(fd_, F_SETFL, O_DIRECT) == 0;
    }
    if (fd_ < 0) fail("cannot make", errno);
    if (direct_ && !takes_blocks()) {
      direct_ = false;
      if (::fcntl(fd_, F_SETFL, 0) != 0) fail("cannot use", errno);
    }
  }
  ~RealTierFile() override { ::close(fd_); }
  RealTierFile(const RealTierFile&) = delete;
  RealTierFile& operator=(const RealTierFile&) = delete;

  void reserve(int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes <= reserved_) return;
    // Not posix_fallocate, which writes to each block where the file system cannot reserve (NFS). There the file only
    // gets its size, and a full disk is reported at the write.
    int failed = 0;
    while ((failed = ::fallocate(fd_, 0, reserved_, bytes - reserved_)) != 0 && errno == EINTR) {
    }
    if (failed != 0 && (errno == EOPNOTSUPP || errno == ENOSYS)) failed = ::ftruncate(fd_, bytes);
    if (failed != 0) {
      fail("cannot reserve " + bytes_text(static_cast<double>(bytes)) + " for", errno);
    }
    reserved_ = bytes;
  }

  void write(int64_t offset, const void* data, int64_t bytes) override {
    move_all(::pwrite, static_cast<const char*>(data), bytes, offset, "cannot write to");
  }
  void read(int64_t offset, void* data, int64_t bytes) override {
    move_all(::pread, static_cast<char*>(data), bytes, offset, "cannot read from");
  }

  bool direct() const override { return direct_; }

 private:
  // Calls pread or pwrite until all bytes have moved.
  template <typename Move, typename At>
  void move_all(Move move, At at, int64_t bytes, int64_t offset, const char* fault) {
    while (bytes > 0) {
      const ssize_t done = move(fd_, at, static_cast<size_t>(bytes), offset);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(fault, done == 0 ? EIO : errno);
      at += done, offset += done, bytes -= done;
    }
  }

  [[noreturn]] void fail(const std::string& what, int error) const { fail_in(folder_, key_, what, error); }

  // Whether a block can be written and read past the page cache: a file system may open a file so and want larger ones.
  bool takes_blocks() const {
    alignas(kBlock) std::array<char, kBlock> block{};
    return ::pwrite(fd_, block.data(), kBlock, 0) == kBlock && ::pread(fd_, block.data(), kBlock, 0) == kBlock;
  }

  const std::string folder_, key_;
  int fd_ = -1;
  bool direct_ = false;
  std::mutex mutex_;
  int64_t reserved_ = 0;
};

}  // namespace

std::unique_ptr<TierFile> TierFile::in_folder(const std::string& folder, const std::string& key) {
  return std::make_unique<RealTierFile>(folder, key);
}

bool lies_in_memory(const std::string& folder) {
  struct statfs of {};
  return ::statfs(folder.c_str(), &of) == 0 && (of.f_type == TMPFS_MAGIC || of.f_type == RAMFS_MAGIC);
}

int64_t free_bytes_in(const std::string& folder, const std::string& key) {
  struct statvfs of {};
  if (::statvfs(folder.c_str(), &of) != 0) fail_in(folder, key, "cannot make", errno);
  return static_cast<int64_t>(of.f_bavail) * static_cast<int64_t>(of.f_frsize);
}

}  // namespace annulus
