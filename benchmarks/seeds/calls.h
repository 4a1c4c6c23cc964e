// What the measurements of `bench seeds` have in common: memory of a process and of a thread, and one call of attention
// over the ranks of a communicator with its costs and, if asked for, a check of its results. Used by the sources of
// this package and by tests.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/pattern/pattern.h"
#include "attention/pattern/span.h"
#include "attention/plan/plan.h"
#include "benchmarks/attention_calls.h"
#include "comm/communicator.h"
#include "memory/peak_bytes.h"
#include "runtime/attend/attend_check.h"
#include "runtime/attend/check_rows.h"

namespace annulus {

// The most bytes that LibTorch has allocated at once on this thread since this was made.
class AllocatedPeak {
 public:
  int64_t bytes() const { return peak_->peak(); }

 private:
  const std::shared_ptr<PeakBytes> peak_ = std::make_shared<PeakBytes>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, peak_};
};

// The pattern, at any length, of which a row of blocks has at most six: its own, its neighbours and three that are
// drawn.
PatternSpec six_blocks_a_row(int64_t length);

// The most resident memory that this process has had since this was made, beyond what it had then. Memory that was
// freed before is given back to the system first. bytes() is 0 where the system does not reset the high-water mark.
class ResidentPeak {
 public:
  ResidentPeak();
  int64_t bytes() const;

 private:
  int64_t before_ = 0;
  bool works_ = false;
};

// Costs of one call over all ranks of a communicator: of the rank with the most, unless it says otherwise.
struct CallFigures {
  double forward_wall = 0, forward_cpu = 0;  // seconds, least of the rounds; CPU: the sum of all ranks
  double cpu = 0;                            // of forward and backward, if there was a backward
  double held_bytes = 0;                     // keys, values and their gradients that a rank holds at once
  double held_over = 0;                      // that over S/P + two blocks of S/P
  double allocated = 0;                      // bytes by LibTorch for this rank, inputs among them
  double resident = 0;                       // bytes that the process added, inputs among it; 0 for threads
  double resident_over = 0;                  // that over 8 tensors of S/P and two travelling blocks of 4
  std::optional<RowsReport> check = {};      // of the last round's results, if a check was asked for
};

struct CallWanted {
  PlanRequest request;  // of all ranks
  int64_t head_dim = 64;
  int64_t rounds = 2;  // that count; one runs before them
  bool backward = false;
  bool processes = false;  // whether each rank is a process
  int64_t check_rows = 0;  // how many rows and keys are drawn and checked in fp64 after all is measured; 0: none
};

// The inputs of a call at these positions, fp32: uniform numbers in [-1, 1), each of which depends on its tensor and
// position alone, so that each rank can make those of others. The gradient of the result has the values of q.
AttentionInputs drawn_inputs(const AttentionShape& shape, int64_t head_dim, const std::vector<Span>& queries,
                             const std::vector<Span>& keys);

// Collective. Checks this rank's results of a call over drawn_inputs() by drawn rows and keys. `ran` is the pattern
// with the block maps that were selected; out has been divided by its output_divisor; dq, dk and dv are undefined if
// there was no backward. All ranks get the same report.
RowsReport check_call(const CallWanted& wanted, const PatternSpec& ran, const AttendResults& mine, Communicator& comm);

// The executor's count for a call of this request, over what a rank's own part and two blocks of S/P, in keys, values
// and, after a backward, their gradients, would take: at most 1 on a ring whose ranks have equal parts.
double held_over_two_blocks(const AttentionStats& forward, const AttentionStats* backward, const PlanRequest& request,
                            int64_t head_dim);

// Collective. Measures with LibTorch's number of threads, then checks. All ranks get the same figures.
CallFigures measure_call(const CallWanted& wanted, Communicator& comm);

// The same over ranks that are threads of this process.
CallFigures measure_threads(const CallWanted& wanted);

}  // namespace annulus
