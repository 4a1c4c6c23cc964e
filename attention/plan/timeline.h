// The time line of a plan as time.h predicts it, as records of the kind that ranks make when they run one
// (common/trace/recorder.h): with the same names and the same numbers of ranks and threads, so that both can be laid
// over each other. Used by `annulus plan --trace`. Not thread safe.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/plan/machine.h"
#include "attention/plan/plan.h"
#include "attention/plan/time.h"
#include "common/trace/recorder.h"

namespace annulus {

class PlanTimeline {
 public:
  PlanTimeline(const MachineProfile& machine, const RowBytes& bytes) : machine_(machine), bytes_(bytes) {}

  // Takes the programs of all ranks, in rank order. The timeline keeps what each step takes and sends, not the
  // programs.
  void add(const Program& program);

  // Returns the records of each rank: a forward in which all ranks begin at 0, and a backward in which all begin when
  // the last has ended its forward. A message lasts from when both ends are ready to when its end, the sender or the
  // receiver, is done with all that it sends or receives in that step, because the prediction does not tell these
  // apart. There are as many messages as the plan has.
  std::vector<TraceRecord> records() const;

  // The number of events of all records.
  int64_t events() const { return events_; }

 private:
  struct MessageCost {
    int32_t peer;
    int64_t bytes;
  };
  struct StepMessages {
    std::vector<MessageCost> sends, receives;
  };
  struct Direction {
    std::vector<RankSteps> ranks;
    std::vector<std::vector<StepMessages>> messages;  // by rank and step
  };
  void add(Direction& direction, const Program& program, bool backward);
  double trace(const Direction& direction, bool backward, double from, std::vector<TraceRecord>& records) const;

  const MachineProfile machine_;
  const RowBytes bytes_;
  Direction forward_, backward_;
  int64_t events_ = 0;
};

}  // namespace annulus
