// The folder of a job's log files, and the removal of those of earlier jobs. Used by launch.cc.
#pragma once

#include <cstdint>
#include <string>

namespace annulus {

// "20261123-163419": the local time now by strftime's `format`.
std::string now_text(const char* format);

// Made by its constructor, and the live job's until its destruction: no other job removes it meanwhile (a lock on
// launch.log in it).
class LogFolder {
 public:
  // `wanted`: where it goes, or where a new folder of this job goes if it holds logs of an earlier one. Empty: a new
  // one in runs/logs, or where that cannot be written, where temporary files go. Raises Error(kResource).
  explicit LogFolder(const std::string& wanted);
  ~LogFolder();
  LogFolder(const LogFolder&) = delete;
  LogFolder& operator=(const LogFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_ = -1;
};

// Of the folders in `base` that `launch` has made, keeps the newest `keep` (0: all) and removes the others, unless
// their job still runs or they hold anything but log files of `launch`. What cannot be removed stays. Returns how many
// are gone.
int64_t prune_log_folders(const std::string& base, int64_t keep);

}  // namespace annulus
