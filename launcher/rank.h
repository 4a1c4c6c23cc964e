// This process as a rank that `annulus launch` watches: tied to the launcher's life, its output sent there. Called by
// main.cc before anything starts a thread.
#pragma once

#include <string_view>

#include "comm/launch_info.h"

namespace annulus {

// Under `annulus launch` (ANNULUS_LAUNCH_DIR): dies with its mpirun, and sends what it prints to the launcher without
// going through mpirun, so that a live progress line stays live. Elsewhere does nothing. Call once, first of all.
void attach_to_launcher(const LaunchInfo& info);

// True when a launcher on this host reads what this rank reports.
bool attached_to_launcher();

// Tells the launcher how this rank ended; `message` is empty when it ended well. `said`: what is to be said was printed
// by one of the ranks. Only when attached.
void report_exit(int code, std::string_view message, bool said);

}  // namespace annulus
