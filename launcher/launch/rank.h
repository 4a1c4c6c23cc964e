// This process as a rank that `annulus launch` watches: tied to the launcher's life, its output sent there. Called by
// program.cc before anything starts a thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/launch_info.h"
#include "common/error.h"

namespace annulus {

// Under `annulus launch` (ANNULUS_LAUNCH_DIR): dies with its mpirun, and sends what it prints to the launcher without
// going through mpirun, so that a live progress line stays live: through named pipes where it runs beside the launcher,
// from elsewhere through the back channel (launcher/hosts/back_channel.h). Elsewhere does nothing. Call once, first of
// all. Error(kUnavailable): the launcher is not reached.
void attach_to_launcher(const LaunchInfo& info);

// True when a launcher reads what this rank reports.
bool attached_to_launcher();

// Where this process runs, by which the ranks beside the launcher know that they are (ANNULUS_LAUNCH_PLACE): the
// system that was booted, the name of the host and the table of processes, since containers share the first two.
std::string process_place();

// Tells the launcher how this rank ended: with which exit code, or with which error. `said`: the error was printed by
// one of the ranks. Does nothing unless attached.
void report_exit(int code);
void report_error(const Error& error, bool said);

// Tells it from where a run of `train` could go on should this job end now: from the checkpoint of `step` in `folder`,
// with the words of `command`. An empty folder: the run has begun and has no checkpoint yet; no command: it is
// complete.
void report_checkpoint(int64_t step, const std::string& folder, const std::vector<std::string>& command);

}  // namespace annulus
