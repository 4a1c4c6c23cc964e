// The deadline of an operation. Internal to comm/: when it has passed, Operation::wait() of the backend, for GPUs
// nccl/operation_watch.cc, and for calls that cannot be polled the watchdog raise the error, whose text begins with
// missed_deadline() (checks.h).
#pragma once

#include <algorithm>
#include <chrono>

#include "comm/communicator.h"

namespace annulus::comm_internal {

using Clock = std::chrono::steady_clock;

inline Clock::duration clock_duration(Seconds seconds) {
  // At most a year: a very large number of seconds would overflow the clock.
  return std::chrono::duration_cast<Clock::duration>(Seconds(std::clamp(seconds.count(), 0.0, 365.0 * 86400)));
}

struct Deadline {
  // `timeout` from now on.
  explicit Deadline(Seconds timeout) : timeout(timeout), time(Clock::now() + clock_duration(timeout)) {}
  bool passed() const { return Clock::now() >= time; }

  Seconds timeout;  // for messages: "not done within 0.5 s"
  Clock::time_point time;
};

}  // namespace annulus::comm_internal
