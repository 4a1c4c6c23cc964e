// The rank's side of `annulus launch`: connects this process to the launcher, which receives its output and how it
// ends, and makes it end with the launcher. Called by program.cc before any thread starts, and by subcommands/train.cc.
// Thread safety: one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/bootstrap/launch_info.h"
#include "common/error.h"

namespace annulus {

// Under `annulus launch` (ANNULUS_LAUNCH_DIR is set), makes this process end with its mpirun, and sends its output
// and its records to the launcher directly instead of through mpirun, so that a progress line is shown without delay.
// It makes three connections (launcher/hosts/launcher_socket.h): two that become its standard output and error, and one
// for messages, which ends with the process. Without `launch` it does nothing. A rank that is not beside a launcher
// which listens at a path only (another host, a container) stays unattached, and mpirun carries its output. Call it
// once, before anything else. Throws Error(kUnavailable) if the launcher cannot be reached.
//
// The first rank of a host also starts the watch of the host (watcher.h).
//
// The messages are {"host", "beat": {"place", "process", "page"}}, where it runs and where its beat can be read
// (watchers.h); {"rank"}, its number in the job; {"record", "shown", "of_one"};
// {"step"}, a step of training that is done; {"checkpoint": {"step", "folder", "command"}}; and how it ends, {"exit"}
// or {"error", "reported", "cause"}.
void attach_to_launcher(const LaunchInfo& info);

// Whether a launcher reads what this rank reports.
bool attached_to_launcher();

// Identifies where this process runs: the boot of the system, the host name and the PID namespace (containers may share
// the first two). Ranks compare it with the launcher's (ANNULUS_LAUNCH_PLACE) to find out whether they are on its host.
std::string process_place();

// Tell the launcher how this rank ended: with an exit code or with an error. `said` means that one of the ranks has
// already printed the error. They do nothing unless attached.
void report_exit(int code);
void report_error(const Error& error, bool said);
// Tells the launcher that this rank ends only because rank `failed` of the job has failed (comm/following_error.h).
void report_following(const Error& error, int failed);
// Tells the launcher the number of this rank in the job, which may differ from the one that mpirun gave it. Does
// nothing unless attached.
void report_number(int rank);

// Tells the launcher that a step of a run of `train` is done. Does nothing unless attached.
void report_step(int64_t step);

// Tells the launcher how a run of `train` could be continued if this job ended now: from the checkpoint of `step` in
// `folder`, with the words of `command`. An empty folder means that the run has no checkpoint yet, and an empty command
// that the run is complete. Does nothing unless attached.
void report_checkpoint(int64_t step, const std::string& folder, const std::vector<std::string>& command);

}  // namespace annulus
