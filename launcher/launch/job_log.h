// Writes the records of a job, those of its ranks and of the launcher, to one file, LOG_DIR/job.log. They are appended
// as they arrive and sorted when the job has ended. Used by supervisor.cc.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/logging/record.h"
#include "launcher/launch/rank_streams.h"

namespace annulus {

// Not thread safe.
class JobLog {
 public:
  // With `json`, a record is one JSON object a line. The newest records, up to `most` bytes of memory, are kept to be
  // sorted at the end. Throws Error(kResource) if the file cannot be made.
  JobLog(const std::string& log_dir, bool json, size_t most = size_t{64} << 20);

  // Appends the record to the file.
  void add(const LogRecord& record);
  // Whether the user should see the record: false for a warning or error that another rank has given in the kFoldTime
  // before it.
  bool is_news(const LogRecord& record);
  // Replaces the file by one with the records in the order of merged() (common/logging/record.h). Records that are no
  // longer in memory stay at the front, as they arrived. If the file cannot be replaced, it stays as it was. Call it
  // last.
  void merge(std::optional<int> failed);
  // See LogFile::lost.
  std::string lost() const { return file_.lost(); }

 private:
  std::string line_of(const LogRecord& record) const;

  std::string path_;
  bool json_;
  size_t most_;
  LogFile file_;
  std::deque<LogRecord> records_;
  size_t bytes_ = 0;    // of memory that records_ takes
  size_t settled_ = 0;  // bytes of the file before the lines of records_
  struct First {
    int rank;  // the first rank that gave it
    std::chrono::system_clock::time_point time;
  };
  std::map<std::tuple<LogLevel, std::string, std::string>, First> warned_;
};

}  // namespace annulus
