// Writes what all ranks of a communicator have recorded (common/trace/recorder.h) into one file, with the clocks of the
// ranks aligned. Used by `train --trace` (runtime/run/run_trace.h) and `attend --trace`. Thread safety: as for the
// communicator.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "common/trace/recorder.h"

namespace annulus {

// How this rank's clock goes against rank 0's.
struct ClockOffset {
  int64_t offset = 0;  // nanoseconds by which it is ahead of rank 0's
  int64_t error = 0;   // the offset is right within so many nanoseconds
};

// A clock of this rank. Ranks whose clocks have the same identity share one.
struct RankClock {
  std::string identity;  // of the host's clock: its boot, and the time namespace
  std::function<int64_t()> now;

  static RankClock steady();  // trace_clock()
};

// Measures the offset by messages to and from rank 0. A rank that shares rank 0's clock has the offset 0, exactly. With
// each other one rank 0 makes kTrips round trips, one rank after the other: rank 0 sends at t0, the rank receives at t1
// and answers at t2, rank 0 has the answer at t3. The offset is ((t1 - t0) + (t2 - t3)) / 2 of the trip that took least
// time, and wrong by at most half of that time, (t3 - t0) - (t2 - t1). Clocks that drift apart add to that, typically
// by 0.01 to 0.05 ms for each second between the measurement and the event. Collective.
inline constexpr int kTrips = 16;
ClockOffset align_clock(Communicator& comm, const RankClock& clock = RankClock::steady());

struct GatheredTrace {
  int64_t dropped = 0;      // records of all ranks for which no room was left
  int64_t clock_error = 0;  // the largest of the ranks', in nanoseconds
};

// Writes the records of all ranks as one file in Chrome's trace event format (common/trace/chrome_trace.h), atomically,
// on rank 0, which receives them rank by rank. `about` are texts that are kept in the file; rank 0's count. Collective.
// Raises Error(kResource) on every rank if the file cannot be written.
GatheredTrace gather_trace(Communicator& comm, const TraceRecord& record, const std::string& path,
                           const std::vector<std::pair<std::string, std::string>>& about);

}  // namespace annulus
