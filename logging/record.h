// A record of the log: its fields and the three forms in which it is written. Without a lock, a file or a clock. Used
// by log.cc, by logger.cc, and by the launcher, which merges the records of a job's ranks.
//
// Thread safety: functions without state.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

inline constexpr int kNoRank = -1;  // of the launcher, and of a process that has not been told its rank

struct LogRecord {
  std::chrono::system_clock::time_point time = {};
  LogLevel level = LogLevel::kInfo;
  std::string host = {};
  int rank = kNoRank;           // in the job
  std::vector<int> ranks = {};  // ascending; of a record that several ranks made alike, else empty
  std::string room = {};
  std::string message = {};
  bool of_one = false;  // one rank of several says it for itself: a terminal shows which; not written
};

// "debug", "info", "warn", "error".
std::string_view level_name(LogLevel level);
const std::vector<std::string>& level_names();

// "2026-11-23T16:34:19.123456Z": such texts are in the order of time.
std::string time_text(std::chrono::system_clock::time_point time);

// "0", "0-3", "0, 2-3". Ascending input.
std::string rank_ranges(const std::vector<int>& ranks);

// As a person sees it on a terminal: "annulus: message", of an error "annulus: rank 2: [room] message".
std::string plain_text(const LogRecord& record);
// A line of a log file: "TIME warn HOST rank 2 [room] message". Further lines of a message are indented.
std::string file_text(const LogRecord& record);
// A line of JSON, whatever bytes the message has: what is no UTF-8 is replaced.
std::string json_text(const LogRecord& record);
// The record that json_text was made of; nothing where the text is of another form. Safe for any text.
std::optional<LogRecord> record_from_json(std::string_view text);

// The records of a job in one order: by time, those of rank `culprit` last, which are in the order of time as well.
// Warnings and errors that several ranks made alike become one record, at the first one's place, with `ranks`. Those of
// the culprit stay its own.
std::vector<LogRecord> merged(std::vector<LogRecord> records, std::optional<int> culprit);

}  // namespace annulus
