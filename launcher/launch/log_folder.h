// Makes the folder of a job's log files, and removes folders of earlier jobs. Used by launch.cc.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// Returns the current local time in strftime's `format`, for example "2026-11-23" for "%Y-%m-%d".
std::string now_text(const char* format);

// The folder of a running job. As long as this object exists, it holds a lock on the folder's launch.log, so that no
// other job removes the folder.
class LogFolder {
 public:
  // Makes the folder `wanted`, or, if that has the logs of another job, a new folder in it. If `wanted` is empty,
  // makes a new folder in runs/logs, or in $TMPDIR/annulus-logs-UID if runs/logs cannot be written. Throws
  // Error(kResource) if no folder can be made.
  explicit LogFolder(const std::string& wanted);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;
};

// Keeps the newest `keep` of the folders in `base` that `launch` has made, and removes the others (0: keeps all). A
// folder also stays if its job still runs, if it has anything but log files of `launch`, or if it cannot be removed.
// Returns the number of removed folders.
int64_t prune_log_folders(const std::string& base, int64_t keep);

}  // namespace annulus
