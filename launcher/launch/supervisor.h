// Supervises one mpirun and its ranks from start to end: shows what they print, receives how they end (rank.h), passes
// on the user's request to stop, and kills what does not stop in time. Used by launch.cc.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/launcher_socket.h"
#include "launcher/launch/launch.h"
#include "launcher/launch/restarts.h"
#include "launcher/launch/signals.h"

namespace annulus {

// Runs `command` (mpirun and its arguments), with logs in `log_dir`; `heading` is the beginning of launch.log. Ranks
// connect to `socket`, for which ANNULUS_LAUNCHER must be set. Returns how it ended once all has
// (exit_report.h). Throws Error(kResource) if mpirun cannot be started.
Attempt supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
                  const std::string& log_dir, const std::string& heading, LauncherSocket& socket);

}  // namespace annulus
