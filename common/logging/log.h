// The log: messages of a process about itself, as records with a time, level, host, rank and module. Most packages use
// it (docs/internals/architecture.md). The requested output of a subcommand, and progress, are not logged. This header
// depends on no library: logger.cc writes the files, and programs install it (logger.h). Without it, for example in a
// Python process that has loaded the operators, records go to standard error.
//
// All functions are thread safe, do not throw and never wait for another rank. They must not be called in a signal
// handler.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "common/logging/record.h"

namespace annulus {

// Returns whether records of this level are logged (`--log-level`, ANNULUS_LOG).
bool log_enabled(LogLevel level);

// Logs a record of this process. `module` is named as in errors ("comm", "train"). `message` does not repeat the level
// and the rank of the record; it is truncated to 64 KiB.
void log(LogLevel level, std::string_view module, std::string_view message);
inline void log_debug(std::string_view module, std::string_view message) { log(LogLevel::kDebug, module, message); }
inline void log_info(std::string_view module, std::string_view message) { log(LogLevel::kInfo, module, message); }
inline void log_warn(std::string_view module, std::string_view message) { log(LogLevel::kWarn, module, message); }
inline void log_error(std::string_view module, std::string_view message) { log(LogLevel::kError, module, message); }

// Logs the error with which this rank fails, or one caught where it cannot be rethrown. `rank` is the rank in the job;
// pass it if the process holds several ranks, or if set_log_place has not been called.
void log_error(const std::exception& error, int rank = kNoRank);

// Logs, on rank 0 alone, a warning that every rank of the job raises. If some ranks may not raise it, call log_warn
// instead: `launch` shows only the first of several equal warnings.
void log_warn_once_per_job(std::string_view module, std::string_view message);

// Logs an error that one rank reports for all of them.
void log_error_for_all(std::string_view module, std::string_view message);

// Logs the last record of a process that is about to end because a thread is stuck, possibly inside log(). Waits at
// most one second for the log's lock, and then writes the record to standard error only.
struct LastWords {
  int rank = kNoRank;   // as for log_error
  bool of_all = false;  // as log_error_for_all
};
void log_last_words(LogLevel level, std::string_view module, std::string_view message, LastWords words = {});

// Logs a record to the log files only, because the caller or the launcher shows the message to the user itself.
void log_unshown(LogLevel level, std::string_view module, std::string_view message);

}  // namespace annulus
