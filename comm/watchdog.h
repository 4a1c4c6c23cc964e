// Ends the process when a call that cannot be polled (MPI_Init, MPI_Comm_split, MPI_Finalize, a device) does not return
// in time. Internal to comm/.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "comm/communicator.h"

namespace annulus::comm_internal {

// Watches from its construction to its destruction. After `timeout` it prints message() to stderr (nothing when it is
// an empty text) and ends the process with _exit(6), the code of ErrorKind::kComm: no destructors, which might block as
// well. Where message() is nullopt, the wait is to go on: it is asked again after another `timeout`.
class Watchdog {
 public:
  Watchdog(Seconds timeout, std::function<std::optional<std::string>()> message);
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
