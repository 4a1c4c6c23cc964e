// The clock of durations. Used by every layer. Thread safe.
#pragma once

#include <chrono>

namespace annulus {

// Returns the seconds since some moment in the past, by a clock that is never set.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace annulus
