// The trace of some steps of a run (`train --trace 100-104`): what every rank records in them, written by rank 0 to
// RUN/traces/steps-100-104.json (comm/gather_trace.h). The trainer and the subcommand `train` use it. Not thread safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "common/trace/recorder.h"

namespace annulus {

// Steps counted as in a run's output, from 1; both are traced.
struct TraceSteps {
  int64_t first = 1, last = 1;
  friend bool operator==(const TraceSteps&, const TraceSteps&) = default;
};

// Parses "100-104", or "100" for one step. Raises Error(kUsage) if the text is not of that form, if the last step comes
// before the first, if there are more than kMostSteps, or if the last is after step `steps`, the run's last.
inline constexpr int64_t kMostSteps = 1000;
TraceSteps parse_trace_steps(std::string_view text, int64_t steps);

class RunTrace {
 public:
  // Prepares the trace in the run's folder, if there is one to be made, and lets the rank save its last operations to
  // RUN/logs, if it has a log there (common/trace/last_operations.h). `done`: the steps that the run has made.
  // Collective, with equal values. Raises Error(kUsage) if the run is past the first step, Error(kResource) if
  // RUN/traces cannot be written.
  RunTrace(const std::optional<TraceSteps>& steps, const std::string& run, Communicator& world, int64_t done);

  // Called before each step, with the steps that have been made: begins or ends the trace. Returns lines to say on rank
  // 0. Collective. Raises Error(kResource).
  std::vector<std::string> before_step(int64_t done);
  // Called after the last step: ends a trace that has begun, also if the run ends before the trace.
  std::vector<std::string> finish(int64_t done);

 private:
  std::string path(int64_t last) const;

  std::optional<TraceSteps> steps_;  // nothing once it is written
  const std::string run_;
  Communicator& world_;
  std::optional<TraceWindow> window_;
};

}  // namespace annulus
