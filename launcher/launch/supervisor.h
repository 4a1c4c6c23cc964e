// Supervises one mpirun and its ranks from start to end: shows what they print, receives how they end (rank.h), passes
// on the user's request to stop, and kills what does not stop in time. Used by launch.cc.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/back_channel.h"
#include "launcher/launch/launch.h"
#include "launcher/launch/signals.h"

namespace annulus {

// Runs `command` (mpirun and its arguments), with pipes for the ranks in `session_dir` and logs in `log_dir`; `heading`
// is the beginning of launch.log. Ranks on other hosts call back through `channel`, for which ANNULUS_BACK must be set;
// it is null if there are none. Returns the exit code once all has ended (verdict.h). Throws Error(kResource) if mpirun
// cannot be started.
int supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
              const std::string& session_dir, const std::string& log_dir, const std::string& heading,
              BackChannel* channel);

}  // namespace annulus
