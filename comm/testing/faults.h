// A communicator with faults, for tests of what code does when ranks and messages fail.
//
//   annulus::run_ranks(3, [&](annulus::Communicator& comm) {
//     const auto faulty = annulus::testing::with_faults(comm, FaultPlan::parse("duplicate:rank=1,nth=2", comm.size()));
//     ring_all_reduce(*faulty, x);                   // must notice, or not care
//   });
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "comm/communicator.h"
#include "comm/testing/fault_plan.h"

namespace annulus::testing {

// What the rank that a plan kills raises between threads: "rank 1 was killed by the plan at call 3 (ring, hop 2)".
class KilledByPlan final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns a communicator that does what `comm` does, and the faults of the plan for this rank. A call counts with its
// splits, and a collective as one call. `kill` raises KilledByPlan on the threads backend, whereupon the others fail at
// once, and elsewhere ends the process by SIGKILL; `stop` stops it by SIGSTOP, between threads by a wait that lasts
// until the others have failed. Duplicates and late messages that nobody receives are left to the end of the process.
//
// comm must outlive the result. Thread safety: as `comm`.
std::shared_ptr<Communicator> with_faults(Communicator& comm, const FaultPlan& plan);

}  // namespace annulus::testing
