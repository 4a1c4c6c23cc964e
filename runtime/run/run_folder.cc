// See run_folder.h.
#include "runtime/run/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/files.h"
#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

namespace fs = std::filesystem;

// Far beyond any real count; a folder with a larger number was not made by this program.
constexpr int64_t kMostRuns = 1'000'000'000;

std::string numbered(const std::string& name, int64_t number) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "-%03lld", static_cast<long long>(number));
  return name + digits;
}

// "quickstart-012" -> {"quickstart", 12}
std::optional<std::pair<std::string, int64_t>> split_number(const std::string& folder) {
  const size_t dash = folder.rfind('-');
  if (dash == std::string::npos || folder.size() - dash - 1 < 3) return std::nullopt;
  const std::optional<int64_t> number = number_of_text<int64_t>(std::string_view(folder).substr(dash + 1));
  if (!number || *number < 1 || *number > kMostRuns) return std::nullopt;
  return std::pair(folder.substr(0, dash), *number);
}

// Returns the runs in `root`: name -> number -> folder.
std::map<std::string, std::map<int64_t, std::string>> runs_in(const std::string& root) {
  std::map<std::string, std::map<int64_t, std::string>> runs;
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string folder = it->path().filename().string();
    if (const auto split = split_number(folder)) runs[split->first][split->second] = folder;
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(ErrorKind::kResource, "run", "the folder " + root + " cannot be read: " + error.message());
  }
  return runs;
}

bool is_run(const std::string& path) { return is_file(path + "/config.toml"); }

// Returns when the run's newest checkpoint was written, by the time of its manifest, or nothing if it has none.
std::optional<fs::file_time_type> checkpoint_time(const std::string& run) {
  std::optional<fs::file_time_type> newest;
  std::error_code error;
  for (fs::directory_iterator it(run + "/checkpoints", error), end; !error && it != end; it.increment(error)) {
    if (!it->path().filename().string().starts_with("step-")) continue;
    std::error_code gone;
    const auto time = fs::last_write_time(it->path() / "manifest.json", gone);
    if (!gone && (!newest || time > *newest)) newest = time;
  }
  return newest;
}

std::string this_host() {
  char name[256] = "unknown";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string owner(int fd) {
  char text[400] = {};
  const ssize_t n = ::pread(fd, text, sizeof text - 1, 0);
  std::string who(text, n > 0 ? static_cast<size_t>(n) : 0);
  who = who.substr(0, who.find('\n'));
  return who.empty() ? "another process" : who;
}

// Returns the end of an error about a run that does not exist: the nearest name in `root`, and the newest run of each
// name.
std::string those_there(const std::string& root, const std::string& wanted) {
  std::vector<std::string> names;
  std::string list;
  for (const auto& [name, numbers] : runs_in(root)) {
    for (const auto& [number, folder] : numbers) names.push_back(folder);
    names.push_back(name);
    list += (list.empty() ? "" : ", ") + numbers.rbegin()->second;
  }
  // Runs whose folders were renamed.
  std::error_code error;
  for (fs::directory_iterator it(root, error), end; !error && it != end; it.increment(error)) {
    const std::string folder = it->path().filename().string();
    if (split_number(folder) || !is_run(it->path().string())) continue;
    names.push_back(folder);
    list += (list.empty() ? "" : ", ") + folder;
  }
  return did_you_mean(wanted, names) +
         (list.empty() ? "; it holds no runs yet; `annulus train` begins one" : "; newest runs: " + list);
}

[[noreturn]] void no_run_at(const std::string& path) {
  std::error_code error;
  const fs::path asked = path, above = asked.has_parent_path() ? asked.parent_path() : fs::path(".");
  if (fs::exists(path, error)) {
    throw Error(ErrorKind::kInput, "run", path + ": this is not a run folder, because it has no config.toml");
  }
  throw Error(
      ErrorKind::kInput, "run",
      path + ": there is no such folder" +
          (fs::is_directory(above, error) ? " in " + above.string() + those_there(above, asked.filename()) : ""));
}

[[noreturn]] void fail(const std::string& what, const std::string& path) {
  throw Error(ErrorKind::kResource, "run", "cannot " + what + " " + path + ": " + std::strerror(errno));
}

}  // namespace

RunFolder RunFolder::create(const std::string& root, const std::string& name) {
  std::error_code error;
  fs::create_directories(root, error);
  if (error) {
    throw Error(ErrorKind::kResource, "run",
                "cannot make the folder " + root + ": " + error.message() + "; set run.folder to one you may write to");
  }
  const auto runs = runs_in(root);
  const auto same = runs.find(name);
  int64_t number = same == runs.end() ? 1 : same->second.rbegin()->first + 1;
  for (;; ++number) {
    const std::string path = root + "/" + numbered(name, number);
    // mkdir succeeds for only one of several runs that start at the same time.
    if (::mkdir(path.c_str(), 0777) == 0) return RunFolder(path, /*fresh=*/true);
    if (errno != EEXIST) fail("make the run folder", path);
  }
}

RunFolder RunFolder::open(const std::string& path) {
  if (!is_run(path)) no_run_at(path);
  return RunFolder(path, /*fresh=*/false);
}

// The file is closed on exec, because a child process must not keep the run locked.
RunFolder::RunFolder(std::string path, bool fresh)
    : path_(std::move(path)), lock_(::open((path_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  const std::string lock = path_ + "/lock";
  if (lock_ < 0) fail("open", lock);
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) fail("lock", lock);
    throw Error(ErrorKind::kBusy, "run",
                path_ + " is in use by " + owner(lock_) + ": wait for it to end or stop it" +
                    (fresh ? "" : "; without --resume a new run folder is begun"));
  }
  const std::string who = "process " + std::to_string(::getpid()) + " on host " + this_host() + "\n";
  // The text is only for people; the lock itself is decisive.
  if (::ftruncate(lock_, 0) != 0 || ::pwrite(lock_, who.data(), who.size(), 0) < 0) fail("write", lock);
}

namespace {

std::string run_written_last(const std::string& root) {
  std::string last;
  std::optional<fs::file_time_type> last_time;
  for (const auto& [name, numbers] : runs_in(root)) {
    for (const auto& [number, folder] : numbers) {
      const std::string run = root + "/" + folder;
      const std::optional<fs::file_time_type> time = is_run(run) ? checkpoint_time(run) : std::nullopt;
      if (!time || (last_time && *time < *last_time)) continue;
      last = run;
      last_time = time;
    }
  }
  if (last.empty())
    throw Error(ErrorKind::kInput, "run", "no run in " + root + " has a checkpoint" + those_there(root, ""));
  return last;
}

}  // namespace

std::string find_run(const std::string& root, const std::string& which) {
  if (which.empty()) return run_written_last(root);
  const std::string trimmed = which.size() > 1 && which.back() == '/' ? which.substr(0, which.size() - 1) : which;
  if (trimmed.find('/') != std::string::npos || trimmed == ".") {
    if (is_run(trimmed)) return trimmed == "." ? "./" : trimmed;
    no_run_at(trimmed);
  }
  const std::string below = root + "/" + trimmed;
  if (is_run(below)) return below;
  const auto runs = runs_in(root);
  const auto same = runs.find(trimmed);
  if (same != runs.end()) {
    std::string newest;
    for (auto it = same->second.rbegin(); it != same->second.rend(); ++it) {
      const std::string run = root + "/" + it->second;
      // A run that failed early leaves a folder without a configuration.
      if (!is_run(run)) continue;
      if (checkpoint_time(run)) return run;
      if (newest.empty()) newest = run;
    }
    if (!newest.empty()) return newest;
  }
  if (is_run(trimmed)) return "./" + trimmed;
  std::error_code error;
  if (fs::symlink_status(below, error).type() != fs::file_type::not_found) no_run_at(below);
  throw Error(ErrorKind::kInput, "run", "there is no run \"" + trimmed + "\" in " + root + those_there(root, trimmed));
}

}  // namespace annulus
