// Ends the process if a call that cannot be polled (MPI_Init, MPI_Comm_split, MPI_Finalize, a call of a device) does
// not return in time. Internal to comm/: used by bootstrap and by the MPI and NCCL backends.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/communicator.h"

namespace annulus::comm_internal {

// Watches from its construction to its destruction, with a thread of its own. After `timeout` it calls message(),
// logs the result as an error of the package "comm" (unless it is empty), and ends the process with _exit(6), the code
// of ErrorKind::kComm. `rank` is the rank in the job; pass it where the log may not know it (log_error in
// common/logging/log.h). Destructors do not run, because they might block as well. If message() returns nullopt, the
// wait continues, and message() is called again after another `timeout`. The watching thread calls message().
class Watchdog {
 public:
  Watchdog(Seconds timeout, std::function<std::optional<std::string>()> message, int rank = -1);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace annulus::comm_internal
