// Configures which records of log.h are logged, and their destinations: the terminal and a file. Used by programs
// (launcher/program.cc), by the launcher, and by a training run, which has a file for each rank. All functions are
// thread safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/logging/record.h"

namespace annulus {

struct LogSettings {
  LogLevel level = LogLevel::kInfo;  // less severe records are discarded
  bool json = false;                 // one JSON object a line, on standard error and in files

  friend bool operator==(const LogSettings&, const LogSettings&) = default;
};

// Parses "warn", "json" or "debug,json"; settings that the text omits come from `base`. Raises Error(kUsage), which
// suggests the nearest word, if a word is neither a level nor "json". `where` is the name of the option or variable.
LogSettings parse_log_settings(std::string_view text, std::string_view where, LogSettings base = {});
// Parses a level alone, with the same error.
LogLevel parse_log_level(std::string_view text, std::string_view where);
// The inverse of parse_log_settings.
std::string log_settings_text(const LogSettings& settings);

LogSettings log_settings();
void set_log_settings(const LogSettings& settings);

// Sets the host and rank of all further records. `world` is the number of ranks of the job, or 0 if it is not known.
void set_log_place(const std::string& host, int rank, int world);

// Receives every record instead of standard error; `shown` is whether the user should see it. It is called by one
// thread at a time, and must not log. Null restores standard error, which gets the shown records only.
using LogConsole = std::function<void(const LogRecord& record, bool shown)>;
void set_log_console(LogConsole console);

// Writes the records (logger.h implements it). It is called by one thread at a time.
class LogBackend {
 public:
  virtual ~LogBackend() = default;
  // Writes the record to the file, if one is open, and passes it to `console`.
  virtual void take(const LogRecord& record, bool shown, const LogConsole& console) = 0;
  // Appends all further records to this file. At `bytes` bytes it is rotated; one older file is kept. Returns the
  // reason if the file cannot be written, otherwise "". An empty path closes the file.
  virtual std::string open_file(const std::string& path, int64_t bytes) = 0;
};
void set_log_backend(std::unique_ptr<LogBackend> backend);

// Opens this rank's log file in a run's folder. It stays open until the process exits, so that it also records the
// error that ends the process. Earlier records, up to 1,000 and 1 MiB, are written first. Warns if the file cannot be
// written. An empty path closes the file. Without a backend the call does nothing.
void open_log_file(const std::string& path, int64_t bytes);

// Returns the records, up to 1,000 and 1 MiB, that were logged before a file was opened, and stops collecting them. The
// launcher calls it, because it writes its records itself (launcher/launch/job_log.h).
std::vector<LogRecord> take_early_records();

}  // namespace annulus
