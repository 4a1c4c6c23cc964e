// Supervisor: one mpirun and the ranks below it, from start to verdict: shows what they print, hears how they end
// (rank.h), passes on the user's wish to stop, and ends what does not end. Used by launch.cc.
#pragma once

#include <string>
#include <vector>

#include "launcher/launch/launch.h"
#include "launcher/launch/signals.h"

namespace annulus {

// Runs `command` (mpirun and its arguments), with pipes for the ranks in `session_dir` and logs in `log_dir`; `heading`
// begins launch.log. Returns the exit code when all has ended (verdict.h). Raises Error(kResource) where it cannot be
// started.
int supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
              const std::string& session_dir, const std::string& log_dir, const std::string& heading);

}  // namespace annulus
