// Supervisor: one mpirun and the ranks below it, from start to verdict: shows what they print, hears how they end
// (rank.h), passes on the user's wish to stop, and ends what does not end. Used by launch.cc.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/back_channel.h"
#include "launcher/launch/launch.h"
#include "launcher/launch/signals.h"

namespace annulus {

// Runs `command` (mpirun and its arguments), with pipes for the ranks in `session_dir` and logs in `log_dir`; `heading`
// begins launch.log. `channel`: by which ranks on other hosts call back, with ANNULUS_BACK set; null where there are
// none. Returns the exit code when all has ended (verdict.h). Raises Error(kResource) where it cannot be
// started.
int supervise(const std::vector<std::string>& command, const LaunchOptions& options, const Signals& signals,
              const std::string& session_dir, const std::string& log_dir, const std::string& heading,
              BackChannel* channel);

}  // namespace annulus
