// Finds out which ranks of this host have started, without MPI: each rank binds a socket in the host's abstract
// namespace, which disappears with its process. With it bootstrap can name a rank that never arrives or is stopped.
// Internal to comm/bootstrap; integration_tests/comm_faults_main.cc uses it as well.
//
// Thread safety: const functions may be called by any thread; claim_report() by one thread at a time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/bootstrap/launch_info.h"

namespace annulus::comm_internal {

class Presence {
 public:
  // Announces this rank on this host. If that fails (the name is taken, sockets are forbidden), the only consequence is
  // that messages have less detail.
  explicit Presence(const LaunchInfo& info);
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

  struct Seen {
    std::vector<int> here;     // ranks that have announced themselves on this host, ascending
    std::vector<int> stopped;  // of these, those whose process is stopped (SIGSTOP, a debugger)
  };
  Seen seen() const;

  // Whether every rank of the job is on this host, alive and not stopped.
  bool all_live() const;

  // Returns true in only one rank of this host: the one that prints the message for all.
  bool claim_report();
  // Whether a rank of this host that is alive has claimed the report.
  bool report_claimed() const;

 private:
  std::string name_of(const std::string& what) const;
  LaunchInfo info_;
  int socket_ = -1;
  int report_ = -1;
};

// Describes which ranks are missing, as far as it is known: "rank 2 has not come (host vm)". `host` is this host's
// name. Sets *local_fault to whether something on this host is wrong.
std::string describe_missing(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             bool* local_fault);

// Describes which ranks are stopped or gone after all had come: "rank 1 is stopped (...)", "rank 1 is gone (host vm)".
// Nothing is known of ranks on other hosts; a rank is reported as gone only if all ranks are on this host and this rank
// could announce itself. Empty if nothing is known. in_job: maps a launcher's rank to its number in the job.
std::string describe_stalled(const LaunchInfo& info, const Presence& presence, const std::string& host,
                             const std::function<int(int)>& in_job);

}  // namespace annulus::comm_internal
