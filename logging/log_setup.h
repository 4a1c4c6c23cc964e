// Where the records of log.h go: the level, the terminal, the file. Used by programs (launcher/program.cc), by the
// launcher, and by a run, which has a file for each rank. All functions are thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "logging/record.h"

namespace annulus {

struct LogSettings {
  LogLevel level = LogLevel::kInfo;  // records below it are not made
  bool json = false;                 // on standard error and in files: one JSON object a line

  friend bool operator==(const LogSettings&, const LogSettings&) = default;
};

// Reads "warn", "json" or "debug,json" over `base`. Raises Error(kUsage), naming the nearest, where a word is neither a
// level nor "json". `where`: the option or variable.
LogSettings parse_log_settings(std::string_view text, std::string_view where, LogSettings base = {});
// The level alone.
LogLevel parse_log_level(std::string_view text, std::string_view where);
// The inverse of parse_log_settings.
std::string log_settings_text(const LogSettings& settings);

LogSettings log_settings();
void set_log_settings(const LogSettings& settings);

// Of the records that follow. `world`: the ranks of the job; 0 where nobody has said.
void set_log_place(const std::string& host, int rank, int world);

// Takes every record in place of standard error; `shown`: a person is to see it. Called one at a time; makes no record
// itself. Null: standard error.
using LogConsole = std::function<void(const LogRecord& record, bool shown)>;
void set_log_console(LogConsole console);

// What writes records (logger.h), called one at a time. Hands each to `console`.
class LogBackend {
 public:
  virtual ~LogBackend() = default;
  virtual void take(const LogRecord& record, bool shown, const LogConsole& console) = 0;
  // Appends to the file from now on; `bytes` is the most it may have, beside one older file of as many. Returns why it
  // cannot be written; empty: it can. An empty path: to none any more.
  virtual std::string open_file(const std::string& path, int64_t bytes) = 0;
};
void set_log_backend(std::unique_ptr<LogBackend> backend);

// Opens this rank's file of a run, until the process ends: what it ends with is written there, too. What was recorded
// before, up to 1,000 records, is written first. A file that cannot be written is a warning. Without a backend nothing
// is opened.
void open_log_file(const std::string& path, int64_t bytes);
void close_log_file();

// What was recorded before there was a file, up to 1,000 records: for who keeps records by itself from now on.
std::vector<LogRecord> take_early_records();

}  // namespace annulus
