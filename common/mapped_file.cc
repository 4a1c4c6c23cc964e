// See mapped_file.h.
#include "common/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstring>
#include <mutex>

#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

// What this thread copies from, and where it goes on if that cannot be read.
struct Guard {
  const char* begin;
  const char* end;
  sigjmp_buf back;
};
thread_local Guard* volatile guard_of_thread = nullptr;

struct sigaction before {};

void on_sigbus(int signal, siginfo_t* info, void* context) {
  Guard* guard = guard_of_thread;
  const char* at = static_cast<const char*>(info->si_addr);
  // A failing page is named by its beginning.
  constexpr int kLargestPage = 65536;
  if (guard && info->si_code > 0 && at + kLargestPage > guard->begin && at < guard->end) {
    // A jump leaves the handler without its return, which would restore the signals that this thread takes.
    pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(guard->back, 1);
  }
  // Somebody else's: the instruction that faulted runs again, with the earlier handler; a signal that was sent is sent
  // again.
  sigaction(signal, &before, nullptr);
  if (info->si_code <= 0) raise(signal);
}

void install_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action {};
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, &before);
  });
}

// False where the bytes cannot be read. No object with a destructor may live here: a jump passes over it.
bool guarded_copy(void* to, const char* from, size_t count) {
  Guard guard;
  guard.begin = from;
  guard.end = from + count;
  if (sigsetjmp(guard.back, 0) != 0) {
    guard_of_thread = nullptr;
    return false;
  }
  guard_of_thread = &guard;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(to, from, count);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  guard_of_thread = nullptr;
  return true;
}

[[noreturn]] void unreadable(std::string_view room, const std::string& path, int reason) {
  throw Error(kind_of_errno(reason), room, path + " cannot be read: " + std::strerror(reason));
}

}  // namespace

FileState::FileState(int descriptor, std::string_view room, const std::string& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) unreadable(room, path, errno);
  if (!S_ISREG(status.st_mode)) throw Error(ErrorKind::kInput, room, path + " is no regular file");
  device_ = status.st_dev;
  inode_ = status.st_ino;
  size_ = status.st_size;
  seconds_ = status.st_mtim.tv_sec;
  nanoseconds_ = status.st_mtim.tv_nsec;
}

void FileState::require_unchanged(std::string_view room, const std::string& path) const {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || status.st_dev != device_ || status.st_ino != inode_) return;
  if (status.st_size == size_ && status.st_mtim.tv_sec == seconds_ && status.st_mtim.tv_nsec == nanoseconds_) return;
  const std::string how = status.st_size == size_
                              ? "it was written to"
                              : "it had " + with_commas(size_) + " bytes, it has " + with_commas(status.st_size);
  throw Error(ErrorKind::kInput, room,
              path + " has changed since the run began (" + how +
                  "): a file stays as it is while a run reads it; write a changed one under another name or rename it "
                  "into place");
}

MappedFile::MappedFile(std::string_view room, std::string path) : room_(room), path_(std::move(path)) {
  install_handler();
  const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) unreadable(room_, path_, errno);
  try {
    state_ = FileState(fd, room_, path_);
    if (size() > 0) {
      void* data = ::mmap(nullptr, static_cast<size_t>(size()), PROT_READ, MAP_SHARED, fd, 0);
      if (data == MAP_FAILED) {
        const int reason = errno;
        throw Error(ErrorKind::kResource, room_, path_ + " cannot be mapped: " + std::strerror(reason));
      }
      data_ = static_cast<const char*>(data);
      // A fault would otherwise read what the disk is set to read ahead, megabytes in places.
      ::madvise(data, static_cast<size_t>(size()), MADV_RANDOM);
    }
  } catch (...) {
    ::close(fd);
    throw;
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<char*>(data_), static_cast<size_t>(size()));
}

void MappedFile::copy(int64_t offset, int64_t count, void* to) const {
  if (offset < 0 || count < 0 || offset > size() || count > size() - offset) {
    throw Error(ErrorKind::kInternal, room_,
                path_ + ": " + with_commas(count) + " bytes from " + with_commas(offset) + " on of " +
                    with_commas(size()) + " were asked for");
  }
  constexpr int64_t kMany = 32768;
  if (count > kMany) will_need(offset, count);
  if (count == 0 || guarded_copy(to, data_ + offset, static_cast<size_t>(count))) return;
  require_unchanged();
  throw Error(ErrorKind::kResource, room_,
              path_ + " cannot be read between bytes " + with_commas(offset) + " and " + with_commas(offset + count) +
                  ": " + std::strerror(EIO));
}

void MappedFile::will_need(int64_t offset, int64_t count) const {
  constexpr int64_t kPage = 4096;
  if (offset < 0 || count <= kPage || offset > size() || count > size() - offset) return;
  const int64_t begin = offset / kPage * kPage;
  ::madvise(const_cast<char*>(data_) + begin, static_cast<size_t>(offset + count - begin), MADV_WILLNEED);
}

}  // namespace annulus
