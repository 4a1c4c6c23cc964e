// The deadline of an operation. Internal to comm/: wait() of each backend raises the error when it has passed, and so
// does the watchdog.
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
