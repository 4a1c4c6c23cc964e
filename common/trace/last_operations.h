// Saves the last records of a rank (recorder.h) beside its log when it fails or is ended, so that one can see what each
// rank did, and what it waited for. Used by launcher/program.cc when a rank fails by an error of communication, by
// comm/watchdog.cc, and by `train` for a rank that is asked to end by SIGTERM. Thread safe.
#pragma once

#include <string>
#include <string_view>

namespace annulus {

// Sets the folder of the files; none is made while it is empty or does not exist.
void set_last_operations_folder(const std::string& folder);

// Writes FOLDER/last-operations-rank-R.json in Chrome's trace event format (chrome_trace.h), in place of an earlier
// one. The times are those of the host's monotonic clock, so that files of one host lie over each other. `why` is kept
// in the file. Returns its path, or "" if it was not written; raises nothing, because the caller has a failure to
// report.
std::string save_last_operations(int rank, std::string_view why) noexcept;

}  // namespace annulus
