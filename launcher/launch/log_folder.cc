// See log_folder.h.
#include "launcher/launch/log_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <regex>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

std::string text_of_time(const char* format, bool utc) {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  utc ? gmtime_r(&now, &parts) : localtime_r(&now, &parts);
  std::array<char, 64> text{};
  return std::string(text.data(), std::strftime(text.data(), text.size(), format, &parts));
}

// Makes the folder and a new launch.log in it, and locks that file. Returns its descriptor, or -1 and sets `error`,
// which is EEXIST if the folder has the logs of another job.
int claim(const std::string& dir, std::error_code& error) {
  const std::string path = dir + "/launch.log";
  for (;;) {
    fs::create_directories(dir, error);
    if (error) return -1;
    // For reading and writing, because over NFS an exclusive lock needs a descriptor that can write.
    int lock = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (lock < 0 && errno == ENOENT) continue;  // another job has just removed the new, empty folder
    int failure = lock < 0 ? errno : 0;
    std::error_code unknown;
    if (failure == EEXIST && !fs::is_regular_file(path, unknown)) {
      lock = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);  // such as a device that the user has linked
      failure = lock < 0 ? errno : 0;
    }
    if (lock < 0) {
      error = std::error_code(failure, std::generic_category());
      return -1;
    }
    // Another job that removes old folders may have got the lock first. If locks do not work here, it got none either.
    while (flock(lock, LOCK_EX) != 0 && errno == EINTR) {
    }
    struct stat ours {
    }, there{};
    if (fstat(lock, &ours) == 0 && stat(path.c_str(), &there) == 0 && ours.st_dev == there.st_dev &&
        ours.st_ino == there.st_ino) {
      return lock;
    }
    close(lock);
  }
}

// Returns the folder and the descriptor of its locked launch.log.
std::pair<std::string, int> make_folder(const std::string& wanted) {
  std::error_code error;
  // In UTC, so that the order of names is that of time even when clocks are set back for the winter.
  const std::string name = text_of_time("%Y%m%d-%H%M%S-", /*utc=*/true) + std::to_string(getpid());
  if (!wanted.empty()) {
    // The logs of another job are kept, because a command that resumes a failed run may name the same folder.
    for (const std::string& dir : {wanted, wanted + "/" + name}) {
      if (const int lock = claim(dir, error); lock >= 0) return {dir, lock};
      if (error != std::errc::file_exists) break;
    }
    throw Error(ErrorKind::kResource, "launcher",
                "--log-dir " + wanted + " cannot be written: " + writing_error_text(error.value()));
  }
  const char* tmp = std::getenv("TMPDIR");
  const std::string fallback = std::string(tmp && *tmp ? tmp : "/tmp") + "/annulus-logs-" + std::to_string(getuid());
  for (const std::string& base : {std::string("runs/logs"), fallback}) {
    const std::string dir = base + "/" + name;
    if (const int lock = claim(dir, error); lock >= 0) return {dir, lock};
  }
  throw Error(ErrorKind::kResource, "launcher",
              "no folder for log files: neither runs/logs nor " + fallback + " can be written (" + error.message() +
                  "); name one with --log-dir");
}

// Removes the folder unless its job runs. launch.log goes last, so that a later call finds a half-removed folder again.
bool remove_folder(const fs::path& folder) {
  static const std::regex ours(
      "rank-[0-9]+\\.log|mpirun\\.log|launch\\.log|(job\\.log|last-operations-rank-[0-9]+\\.json)(\\.tmp-[0-9]+)?");
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->is_regular_file(error) || it->is_symlink(error)) return false;
    if (!std::regex_match(it->path().filename().string(), ours)) return false;
    if (it->path().filename() != "launch.log") files.push_back(it->path());
  }
  if (error) return false;
  const fs::path last = folder / "launch.log";
  const int lock = open(last.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (lock < 0) return false;  // not made by `launch`, or not complete yet
  const bool ended = flock(lock, LOCK_EX | LOCK_NB) == 0;
  if (ended) {
    files.push_back(last);
    for (const fs::path& file : files) fs::remove(file, error);
    fs::remove(folder, error);
  }
  close(lock);
  return ended && !fs::exists(folder, error);
}

}  // namespace

std::string now_text(const char* format) { return text_of_time(format, /*utc=*/false); }

LogFolder::LogFolder(const std::string& wanted) { std::tie(path_, lock_) = make_folder(wanted); }

LogFolder::~LogFolder() {
  if (lock_ >= 0) close(lock_);
}

int64_t prune_log_folders(const std::string& base, int64_t keep) {
  if (keep <= 0) return 0;
  static const std::regex named("[0-9]{8}-[0-9]{6}-[0-9]+");
  std::error_code error;
  std::vector<fs::path> folders;
  for (fs::directory_iterator it(base, error), end; !error && it != end; it.increment(error)) {
    std::error_code unknown;
    if (!it->is_directory(unknown) || it->is_symlink(unknown)) continue;
    if (std::regex_match(it->path().filename().string(), named)) folders.push_back(it->path());
  }
  std::sort(folders.rbegin(), folders.rend());  // the names begin with the time, so the newest come first
  int64_t removed = 0;
  for (size_t i = static_cast<size_t>(keep); i < folders.size(); ++i) removed += remove_folder(folders[i]) ? 1 : 0;
  return removed;
}

}  // namespace annulus
