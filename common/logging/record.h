// A record of the log: its fields, and the three formats in which it is written. Used by log.cc, by logger.cc, and by
// the launcher, which merges the records of a job's ranks.
//
// Thread safe: functions without state.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

inline constexpr int kNoRank = -1;  // the launcher, or a process that does not know its rank

struct LogRecord {
  std::chrono::system_clock::time_point time = {};
  LogLevel level = LogLevel::kInfo;
  std::string host = {};
  int rank = kNoRank;           // in the job
  std::vector<int> ranks = {};  // ascending; empty unless merged() joined equal records of several ranks
  std::string module = {};
  std::string message = {};
  bool of_one = false;  // whether a terminal shows the rank of an error; not written to files
};

// Returns "debug", "info", "warn" or "error".
std::string_view level_name(LogLevel level);
const std::vector<std::string>& level_names();

// Returns "2026-11-23T16:34:19.123456Z" (UTC). Such texts sort by time.
std::string time_text(std::chrono::system_clock::time_point time);

// Formats for a terminal: "annulus: message", or for an error "annulus: rank 2: [module] message".
std::string plain_text(const LogRecord& record);
// Formats for a log file: "TIME warn HOST rank 2 [module] message". Further lines of a message are indented.
std::string file_text(const LogRecord& record);
// Formats as JSON, without a line break. Bytes that are not valid UTF-8 are replaced.
std::string json_text(const LogRecord& record);
// The inverse of json_text, except for `ranks`. Returns nullopt if the text is not such a record. Safe for any text.
std::optional<LogRecord> record_from_json(std::string_view text);

// merged() joins equal records of several ranks that are at most this far apart.
inline constexpr std::chrono::seconds kFoldTime{60};

// Sorts the records of a job by time, with those of rank `failed`, whose failure ended the job, last. Equal warnings
// and errors of several ranks become one record, with `ranks`, at the place of the first, if they follow it within
// kFoldTime. Those of the rank that failed are not joined with others. For example, if ranks 0, 1 and 2 warn of a slow
// disk and rank 2 failed, the result has one warning of ranks 0-1 and, at the end, one of rank 2.
std::vector<LogRecord> merged(std::vector<LogRecord> records, std::optional<int> failed);

}  // namespace annulus
