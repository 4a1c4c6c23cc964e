// See session_dir.h.
#include "launcher/hosts/session_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

std::string prefix() { return "annulus-" + std::to_string(getuid()) + "-"; }

std::string base() {
  if (access("/dev/shm", W_OK | X_OK) == 0) return "/dev/shm";
  // A long path would exceed the 108 bytes of a Unix socket's address, which Open MPI uses.
  const char* tmp = std::getenv("TMPDIR");
  return tmp != nullptr && *tmp == '/' && std::strlen(tmp) < 40 ? tmp : "/tmp";
}

// Removes folders whose process has ended. A running launch or host discovery holds a lock in its folder, which the
// kernel releases when the process ends, whatever the cause. A folder without a lock file may just be being made, so it
// is removed only if it is older than a minute.
void remove_abandoned() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(base(), ignored)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(prefix())) continue;
    const int fd = open((entry.path() / "lock").c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
      const auto made = fs::last_write_time(entry.path(), ignored);
      if (!ignored && fs::file_time_type::clock::now() - made > std::chrono::minutes(1)) fs::remove_all(entry, ignored);
      continue;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) fs::remove_all(entry.path(), ignored);
    close(fd);
  }
}

}  // namespace

std::string SessionDir::pattern() { return base() + "/" + prefix() + "XXXXXX"; }

SessionDir::SessionDir() {
  remove_abandoned();
  path_ = pattern();
  if (mkdtemp(path_.data()) == nullptr) {
    throw Error(ErrorKind::kResource, "launcher",
                "cannot make a folder like " + path_ + ": " + writing_error_text(errno));
  }
  const std::string making = path_ + "/lock.new";
  lock_ = open(making.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_ < 0 || flock(lock_, LOCK_EX | LOCK_NB) != 0 ||
      std::rename(making.c_str(), (path_ + "/lock").c_str()) != 0) {
    const int error = errno;
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    throw Error(ErrorKind::kResource, "launcher", "cannot write in " + path_ + ": " + writing_error_text(error));
  }
}

SessionDir::~SessionDir() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (lock_ >= 0) close(lock_);
}

}  // namespace annulus
