// Proves a plan on all ranks together (attention/proof/verifier.h): each rank proves its own program and compares its
// transfers with what its peers say about the same transfers. Called by plan_calls, and by calls of attention whose
// plan is not proved yet.
#pragma once

#include "attention/proof/plans.h"
#include "comm/communicator.h"

namespace annulus {

// Collective. Compares this rank's share of the proof with the shares of its peers, in one exchange of a digest each
// way between any two ranks. If a rank finds a fault in its own program or between itself and a peer, every rank raises
// Error(kInternal), since the fault is one of annulus. Otherwise the plan is proved.
void prove_together(const RankPlan& plan, Communicator& comm);

}  // namespace annulus
