// Converts a timeout in seconds to a deadline of the steady clock. Internal to comm/.
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

inline Clock::time_point deadline_of(Seconds timeout) { return Clock::now() + clock_duration(timeout); }

}  // namespace annulus::comm_internal
