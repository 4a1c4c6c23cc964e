// Who has come, before MPI can be asked: each rank holds a socket in the host's abstract name space, which vanishes
// with its process. Lets bootstrap name a rank that never arrives or is stopped. Internal to comm/.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/launch_info.h"

namespace annulus::comm_internal {

class Presence {
 public:
  // Announces this rank on this host. Failing to (a name taken, sockets forbidden) only costs the detail in messages.
  explicit Presence(const LaunchInfo& info);
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  struct Seen {
    std::vector<int> here;     // ranks that have announced themselves on this host, ascending
    std::vector<int> stopped;  // of these, those whose process is stopped (SIGSTOP, a debugger)
  };
  Seen look() const;

  // Whether every rank of the job is on this host, lives and is not stopped.
  bool all_live() const;

  // True in one rank of this host, once: the one that speaks for all.
  bool claim_report();
  // Whether a living rank of this host has.
  bool report_claimed() const;

 private:
  std::string name_of(const std::string& what) const;
  LaunchInfo info_;
  int socket_ = -1;
  int report_ = -1;
};

// "rank 2 has not come" and the like, for the ranks of this host and of all hosts as far as it can be told.
// local_fault: set to whether something on this host is wrong.
std::string describe_missing(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             bool* local_fault);

// "rank 1 is stopped (...)", "rank 1 is gone (host vm)": of ranks that had all come. Empty where nothing is known: of
// ranks of other hosts, and of any where this rank could not announce itself. `in_job`: the number of a rank in the
// job.
std::string describe_stalled(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             const std::function<int(int)>& in_job);

}  // namespace annulus::comm_internal
