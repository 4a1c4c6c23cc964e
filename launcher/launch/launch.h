// launch: starts the ranks of a subcommand through mpirun, on this host or on several, watches them, merges what they
// print, stops them and reports how they ended. The subcommand `launch` (subcommand_launch.cc) and benchmarks call it.
//
// The launcher starts mpirun, and mpirun starts the ranks, which run the launcher's own program. Ranks connect to the
// launcher and send it what they print and how they end (launcher/launch/rank.h). Other hosts are asked for a report
// before any rank starts (launcher/hosts/host_discovery.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launcher/hosts/host_list.h"
#include "launcher/network/network.h"

namespace annulus {

struct LaunchOptions {
  int ranks = 1;
  std::optional<HostList> hosts;   // nothing: this host, or the hosts that `mpi_args` name
  std::vector<std::string> files;  // files that must be the same on every host (Subcommand::files)
  // The number of ranks in a ring (Subcommand::context), for the placement. Throws if so many ranks cannot run it.
  std::function<int(int ranks)> context = [](int all) { return all; };
  int restarts = 0;                   // how often a job that failed begins again (restarts.h)
  std::string device = "cpu";         // what the ranks compute on (Subcommand::device)
  Network network;                    // the job's network: the options of `launch`, or else the subcommand's
  bool dry_run = false;               // print the placement and the mpirun command, start no rank
  std::string log_dir;                // empty: runs/logs/DATE-TIME-PID below the current folder
  int64_t keep_logs = 0;              // how many of the newest folders of runs/logs are kept; 0: all
  double stuck_seconds = 30;          // for how long a rank may stand still (stuck_rule.h); 0: for ever
  double grace_seconds = 30;          // the time from the first Ctrl-C until ranks are killed
  std::vector<std::string> mpi_args;  // passed to mpirun unchanged
  std::vector<std::string> program;   // the subcommand and its arguments
  std::vector<std::string> typed;     // the words of the command as the user typed them, the program first
};

// Starts the job, and again as long as next_attempt() says so: without the hosts that do not answer any more, and if
// the slots of the others are too few, with the largest number of ranks that fits them. Each attempt has a log folder,
// the later ones below that of the first. Returns the exit code of the last attempt: 0; that of the first rank that
// failed (128 + S for a rank killed by signal S); or, if no rank failed while it stopped, 130, 143, 129 or 138 after
// SIGINT, SIGTERM, SIGHUP or SIGUSR1, 141 if the output was closed, and 8 if it could not be written. Throws
// Error(kUnavailable) without mpirun or if a host does not report, Error(kUsage) inside a rank, Error(kResource) if no
// log folder can be made or too few files may be open, and the kind of the first finding that is an error
// (launcher/doctor/host_checks.h).
int run_launch(const LaunchOptions& options);

}  // namespace annulus
