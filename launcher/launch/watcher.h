// The watch of the ranks of one host: a process that the first rank there makes before anything else, and that outlives
// the ranks. It tells the launcher what HostWatch finds. When the launcher is gone, it ends the ranks of its host and
// removes the launch's folder. Used by rank.cc; watchers.h is the launcher's side.
#pragma once

#include <string>

namespace annulus {

// Starts the watch of this host; `rank` is this rank's number for mpirun, `folder` the folder of the launch if it is on
// this host (SessionDir), else empty. It connects to the launcher at `address` with the purpose "watch"
// (launcher/hosts/launcher_socket.h), which sends it {"rank", "process", "page"} for each rank of this host, and sends
// the messages of HostWatch::look, and {"over"} before it ends. ANNULUS_STUCK_AFTER has the seconds of `launch
// --stuck-after`. If no process can be made, the host stays unwatched. Throws Error(kUnavailable) if the launcher
// cannot be reached. Call it before any thread starts.
void start_watcher(const std::string& address, int rank, const std::string& folder);

}  // namespace annulus
