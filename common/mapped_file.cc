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

#include "common/descriptor.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"

namespace annulus {
namespace {

// The memory that this thread copies from, and where to continue if it cannot be read.
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
  // The address may be the beginning of the page that cannot be read.
  constexpr int kLargestPage = 65536;
  if (guard && info->si_code > 0 && at + kLargestPage > guard->begin && at < guard->end) {
    // Returning from the handler would restore the thread's signal mask; a jump does not, so it is restored here.
    pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(guard->back, 1);
  }
  // Another part of the program caused it: with the earlier handler installed, the instruction that faulted runs again;
  // a signal that a process sent is sent again.
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

// Returns false if the bytes cannot be read. It must have no object with a destructor, because a jump would skip it.
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

[[noreturn]] void unreadable(std::string_view module, const std::string& path, int reason) {
  throw Error(kind_of_errno(reason), module, path + " cannot be read: " + std::strerror(reason));
}

}  // namespace

FileState::FileState(int descriptor, std::string_view module, const std::string& path) {
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) unreadable(module, path, errno);
  if (!S_ISREG(status.st_mode)) throw Error(ErrorKind::kInput, module, path + " is no regular file");
  device_ = status.st_dev;
  inode_ = status.st_ino;
  size_ = status.st_size;
  seconds_ = status.st_mtim.tv_sec;
  nanoseconds_ = status.st_mtim.tv_nsec;
}

void FileState::require_unchanged(std::string_view module, const std::string& path) const {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || status.st_dev != device_ || status.st_ino != inode_) return;
  if (status.st_size == size_ && status.st_mtim.tv_sec == seconds_ && status.st_mtim.tv_nsec == nanoseconds_) return;
  const std::string how = status.st_size == size_
                              ? "it was written to"
                              : "it had " + with_commas(size_, "byte") + ", it has " + with_commas(status.st_size);
  throw Error(ErrorKind::kInput, module,
              path + " has changed since the run began (" + how +
                  "): do not change a file while a run reads it; write a new version under another name, or rename it "
                  "into place");
}

MappedFile::MappedFile(std::string_view module, std::string path) : module_(module), path_(std::move(path)) {
  install_handler();
  const Descriptor fd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd < 0) unreadable(module_, path_, errno);
  state_ = FileState(fd, module_, path_);
  if (size() == 0) return;
  void* data = ::mmap(nullptr, static_cast<size_t>(size()), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    throw Error(ErrorKind::kResource, module_, path_ + " cannot be mapped: " + std::strerror(errno));
  }
  data_ = static_cast<const char*>(data);
  // Otherwise each fault would read ahead as much as the disk is configured for, which may be megabytes.
  ::madvise(data, static_cast<size_t>(size()), MADV_RANDOM);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<char*>(data_), size());
}

void MappedFile::copy(int64_t offset, int64_t count, void* to) const {
  if (offset < 0 || count < 0 || offset > size() || count > size() - offset) {
    throw Error(ErrorKind::kInternal, module_,
                path_ + ": asked for " + with_commas(count, "byte") + " from byte " + with_commas(offset) +
                    " on, but it has " + with_commas(size(), "byte"));
  }
  constexpr int64_t kMany = 32768;
  if (count > kMany) will_need(offset, count);
  if (count == 0 || guarded_copy(to, data_ + offset, count)) return;
  require_unchanged();
  throw Error(ErrorKind::kResource, module_,
              path_ + " cannot be read between bytes " + with_commas(offset) + " and " + with_commas(offset + count) +
                  ": " + std::strerror(EIO));
}

void MappedFile::will_need(int64_t offset, int64_t count) const {
  constexpr int64_t kPage = 4096;
  if (offset < 0 || count <= kPage || offset > size() || count > size() - offset) return;
  const int64_t begin = offset / kPage * kPage;
  ::madvise(const_cast<char*>(data_) + begin, offset + count - begin, MADV_WILLNEED);
}

}  // namespace annulus
