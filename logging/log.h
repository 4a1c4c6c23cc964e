// The log: what a process says of itself, as records with time, level, host, rank and room. Any room but those below
// this one may call it; what a verb was asked to print, and progress, are no log. This header includes no library's:
// what writes files is logger.cc, which programs install (log_setup.h). Without it records go to standard error, as in
// a Python that has loaded the operators.
//
// All functions are thread-safe, raise nothing and never wait for another rank. They may not be called in a signal
// handler.
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "logging/record.h"

namespace annulus {

// Whether records of this level are wanted (`--log-level`, ANNULUS_LOG).
bool log_enabled(LogLevel level);

// A record of this process. room: as in errors, "comm", "train"; message: without the level and the rank, which the
// record has; cut behind 64 KiB.
void log(LogLevel level, std::string_view room, std::string_view message);
inline void log_debug(std::string_view room, std::string_view message) { log(LogLevel::kDebug, room, message); }
inline void log_info(std::string_view room, std::string_view message) { log(LogLevel::kInfo, room, message); }
inline void log_warn(std::string_view room, std::string_view message) { log(LogLevel::kWarn, room, message); }
inline void log_error(std::string_view room, std::string_view message) { log(LogLevel::kError, room, message); }

// What this rank fails with, or would fail with if it could. `rank`: in the job, where the process holds several, or
// where it has not been told its own.
void log_error(const std::exception& error, int rank = kNoRank);

// A warning that all ranks of the job would give alike: rank 0's is the only one. Where each rank finds out for itself
// call log_warn: `launch` shows the first of several that are alike.
void log_warn_once_per_job(std::string_view room, std::string_view message);

// An error that one rank tells for all.
void log_error_for_all(std::string_view room, std::string_view message);

// A record for the log files alone: the caller, or the launcher, shows it to the user in another way.
void log_unshown(LogLevel level, std::string_view room, std::string_view message);

}  // namespace annulus
