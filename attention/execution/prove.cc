// Proving a plan once for all ranks, before any of them sends.
#include <exception>

#include "attention/execution/attention.h"
#include "attention/plan/verifier.h"
#include "common/error.h"

namespace annulus {

void prove_plan(const PlanRequest& request, Communicator& comm) {
  constexpr int kMostRanks = 128;
  if (request.ranks > kMostRanks || is_adaptive(request.pattern)) return;
  std::string fault;
  if (comm.rank() == 0) {
    try {
      const Proof proof = verify(request);
      if (!proof.holds()) fault = proof.faults[0];
    } catch (const std::exception& error) {  // out of memory, say: the others wait for this rank's word
      fault = error.what();
    }
  }
  fault = all_gather_text(comm, fault, {"proving the plan", 0})[0];
  if (!fault.empty()) {
    throw Error(ErrorKind::kInternal, "plan",
                "the plan for " + request.text() + " is wrong: " + fault + "; please report it");
  }
}

}  // namespace annulus
