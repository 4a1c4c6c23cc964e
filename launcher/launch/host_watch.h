// Watches the ranks of one host from outside of their processes: reads their beats (common/trace/beat.h), asks the
// kernel for the state of those that stand still, and notices the end of a rank and of mpirun's daemon at once. Used by
// watcher.cc. Thread safety: one thread at a time.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/descriptor.h"
#include "common/trace/beat.h"
#include "launcher/launch/stuck_rule.h"

namespace annulus {

class HostWatch {
 public:
  // `after`: for how many seconds a rank may be stopped or without progress (StuckRule); 0: for ever. `daemon`: the
  // process that has started the ranks. root: a prefix of /proc/vmstat, for tests.
  HostWatch(double after, pid_t daemon, std::string root = "");
  ~HostWatch();
  HostWatch(const HostWatch&) = delete;
  HostWatch& operator=(const HostWatch&) = delete;

  // Adds a rank, given by its process and the descriptor of its page there. Without a page that can be read, only the
  // state of its process is watched.
  void add(int rank, pid_t process, int page);

  // Adds descriptors to poll, which become readable when a rank or the daemon ends.
  void watch(std::vector<pollfd>& fds) const;

  // Looks at all ranks, `elapsed` seconds after the last time, and returns what is new:
  // {"stuck", "text"}, a rank and how it stands still, once while it does;
  // {"memory"}, a rank that ended just after the kernel had ended a process of this host for lack of memory;
  // {"daemon"}, the process of the daemon, if it ended before all of its ranks.
  std::vector<nlohmann::json> look(double elapsed);

  // Whether there were ranks and all have ended.
  bool over() const;
  // Ends those that have not, by SIGKILL.
  void end_ranks() const;

 private:
  struct Rank;
  void look_at_ends(double elapsed, std::vector<nlohmann::json>& news);
  int64_t ended_for_memory() const;

  const double after_;
  const pid_t daemon_;
  const std::string vmstat_;
  const Descriptor daemon_end_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  bool daemon_said_ = false;
  bool outlived_ = false;     // a rank has ended before the daemon, as it should be
  int64_t memory_kills_ = 0;  // the kernel's count
  double since_memory_;       // seconds since it last rose
};

// What the kernel says of a process: "it is stopped (SIGSTOP)", "it sleeps (S, in hrtimer_nanosleep)", with the names
// of kernel functions where the kernel tells them, and those of its other threads that wait for a device or a file
// system (D). "it is gone" if it is.
std::string process_text(pid_t process);

}  // namespace annulus
