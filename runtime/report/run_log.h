// Reads the logs in a run's folder: what a report shows of them (run_data.h). Needs no LibTorch. Thread safe: functions
// without state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/logging/record.h"

namespace annulus {

struct RunLog {
  // A warning or an error, once, however often it was given, also with other numbers ("step 7: ...", "step 8: ...").
  struct Entry {
    LogRecord record;          // the first one, with the ranks of all
    int64_t times = 1;         // how many such records there are, of all ranks
    std::string last;          // when the last of them came, as time_text()
    std::string last_message;  // and what it said
  };
  std::vector<Entry> entries;     // by time
  int64_t left_out = 0;           // earlier entries that are not in the list
  bool cut = false;               // whether only the end of a large file was read
  std::vector<LogRecord> begins;  // what rank 0 said of the newest process when it began: device, kernel, memory, data

  enum class End { kUnknown, kDone, kStopped, kFailed };
  End end = End::kUnknown;  // what the logs say of the end of the newest process, or those of its launcher
  std::string end_text;     // its message
};

// Parses a line of a log file, "TIME warn HOST rank 2 [module] message" or "TIME error HOST launcher message", or one
// of JSON. Returns false for another line, such as a further line of a message.
bool parse_log_line(const std::string& line, LogRecord& record);

// Reads the logs of all ranks in a run's folder. If they do not say how the newest process ended, because it was
// killed, also what `launch` said of it in logs/ beside the run's folder. What is missing or cannot be read is left
// out.
RunLog read_run_log(const std::string& run);

}  // namespace annulus
