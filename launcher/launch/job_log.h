// The records of a job: those of its ranks and of the launcher in one file, LOG_DIR/job.log. As they come they are
// appended; when the job has ended they are put into one order. Used by supervisor.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "launcher/launch/rank_streams.h"
#include "logging/record.h"

namespace annulus {

// Not thread-safe.
class JobLog {
 public:
  // json: one JSON object a line. `most`: bytes of records that are kept in memory until the end, the newest ones.
  // Raises Error(kResource).
  JobLog(const std::string& log_dir, bool json, size_t most = size_t{64} << 20);

  // Appends it.
  void add(const LogRecord& record);
  // Whether a person is to see it: no where another rank has given the same warning. Errors count as warnings do.
  bool is_news(const LogRecord& record);
  // Replaces the file by one that is in order: merged() of record.h, where older records than are kept in memory stay
  // in front, as they came. A file that cannot be replaced stays as it was.
  void merge(std::optional<int> culprit);
  // As that of LogFile.
  std::string lost() const { return file_.lost(); }

 private:
  std::string line_of(const LogRecord& record) const;

  std::string path_;
  bool json_;
  size_t most_;
  LogFile file_;
  std::deque<LogRecord> records_;
  size_t bytes_ = 0;                                                      // of their lines
  size_t settled_ = 0;                                                    // bytes of the file in front of them
  std::map<std::tuple<LogLevel, std::string, std::string>, int> warned_;  // who was the first
};

}  // namespace annulus
