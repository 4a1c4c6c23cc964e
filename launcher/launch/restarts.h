// Decides whether a job that failed begins again (`launch --restarts N`), and how. Used by launch.cc. No function here
// uses a process, a file or a clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launcher/launch/exit_report.h"

namespace annulus {

// How one attempt of a job ended.
struct Attempt {
  int code = 0;                            // its exit code
  bool stopped = false;                    // the user asked it to stop, or what it prints can no longer be written
  std::optional<int64_t> step = {};        // the newest step that it finished
  std::optional<ResumePoint> resume = {};  // for a run of `train` that had begun
};

struct NextAttempt {
  bool again = false;
  std::string why;                        // for the user; empty if there is nothing to say
  std::vector<std::string> program = {};  // the subcommand and its arguments, if `again`
};

// What comes after these attempts of a job, the latest last. `program` is the subcommand and its arguments as typed. A
// job begins again, from its newest checkpoint if it has one, unless it ended well or was asked to stop; the error is
// one that would come again (of the command line, the configuration, an input file, a plan, or ranks that differ);
// the latest two attempts failed in the same step; or it has already begun again `restarts` times.
NextAttempt next_attempt(const std::vector<Attempt>& attempts, int restarts, const std::vector<std::string>& program);

}  // namespace annulus
