// See log_folder.h.
#include "launcher/launch/log_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <regex>
#include <system_error>
#include <vector>

#include "common/error.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

std::string make_folder(const std::string& wanted) {
  std::error_code error;
  const std::string name = now_text("%Y%m%d-%H%M%S-") + std::to_string(getpid());
  if (!wanted.empty()) {
    // The logs of an earlier job are kept, because a command that resumes a failed run may name the same folder.
    const bool used = fs::is_regular_file(fs::path(wanted) / "launch.log", error);
    const std::string dir = used ? wanted + "/" + name : wanted;
    fs::create_directories(dir, error);
    if (!error && access(dir.c_str(), W_OK | X_OK) == 0) return dir;
    throw Error(ErrorKind::kResource, "launcher",
                "--log-dir " + wanted + " cannot be written: " + (error ? error.message() : std::strerror(errno)));
  }
  const char* tmp = std::getenv("TMPDIR");
  const std::string fallback = std::string(tmp && *tmp ? tmp : "/tmp") + "/annulus-logs-" + std::to_string(getuid());
  for (const std::string& base : {std::string("runs/logs"), fallback}) {
    const std::string dir = base + "/" + name;
    if (fs::create_directories(dir, error) && !error) return dir;
  }
  throw Error(ErrorKind::kResource, "launcher",
              "no folder for log files: neither runs/logs nor " + fallback + " can be written (" + error.message() +
                  "); name one with --log-dir");
}

// Removes the folder unless its job runs. launch.log goes last, so that a later call finds a half-removed folder again.
bool remove_folder(const fs::path& folder) {
  static const std::regex ours("rank-[0-9]+\\.log|mpirun\\.log|launch\\.log|job\\.log");
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (!it->is_regular_file(error) || it->is_symlink(error)) return false;
    if (!std::regex_match(it->path().filename().string(), ours)) return false;
    if (it->path().filename() != "launch.log") files.push_back(it->path());
  }
  if (error) return false;
  const fs::path last = folder / "launch.log";
  const int lock = open(last.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
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

std::string now_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 64> text{};
  return std::string(text.data(), std::strftime(text.data(), text.size(), format, &local));
}

LogFolder::LogFolder(const std::string& wanted) : path_(make_folder(wanted)) {
  lock_ = open((path_ + "/launch.log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ >= 0) flock(lock_, LOCK_EX | LOCK_NB);  // if locks do not work here, remove_folder gets none either
}

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
