// launch: starts the ranks of a verb through mpirun, on this host or on several, watches them, merges what they print,
// stops them and reports how they ended. The verb `launch` (verb_launch.cc) calls it.
//
// Three processes deep: this launcher -> mpirun -> ranks, all of the same program. Ranks report to the launcher
// (launcher/launch/rank.h) what they print and how they end: through named pipes in a folder of this launch, from other
// hosts through the back channel. Other hosts are surveyed before any rank starts (launcher/hosts/survey.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts/host_list.h"
#include "launcher/network/network.h"

namespace annulus {

struct LaunchOptions {
  int ranks = 1;
  std::optional<HostList> hosts;      // nothing: this host, or those that `mpi_args` name
  std::vector<std::string> files;     // that the ranks read, the same on every host (Verb::files)
  int context = 1;                    // ranks of a ring (Verb::context)
  std::string device = "cpu";         // what its ranks compute on (Verb::device)
  Network network;                    // of the job: what was typed, else the verb's
  bool dry_run = false;               // print the placement and the mpirun command, start no rank
  std::string log_dir;                // empty: runs/logs/DATE-TIME-PID below the current folder
  double grace_seconds = 30;          // from the first Ctrl-C until ranks are ended
  std::vector<std::string> mpi_args;  // handed to mpirun as they are
  std::vector<std::string> program;   // the verb and its arguments
  std::vector<std::string> typed;     // the words of the command as the user typed them, the program first
};

// The exit code: 0; that of the first rank that failed (a rank killed by signal S: 128 + S); 130, 143 or 129 after
// SIGINT, SIGTERM or SIGHUP, 138 after SIGUSR1, 141 when the output was closed, 8 when it could not be written, unless
// a rank failed while it stopped. Raises Error(kUnavailable) without mpirun or where a host does not report,
// Error(kUsage) inside a rank, Error(kResource) when no log folder can be made, and the kind of the first finding
// (launcher/hosts/host_checks.h) that keeps a job from these hosts.
int run_launch(const LaunchOptions& options);

}  // namespace annulus
