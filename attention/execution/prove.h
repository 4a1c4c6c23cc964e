// Proving a plan on all ranks together (attention/plan/verifier.h): each rank proves its own program, and compares its
// transfers with what its peers say of the same. Called by every attention call whose plan is not proved yet, and
// before the first step by `attend` and the trainer.
#pragma once

#include "attention/plan/plan.h"
#include "attention/plan/proofs.h"
#include "comm/communicator.h"

namespace annulus {

// Whether calls prove their plans where they do not say it: unless ANNULUS_PROVE is 0. Error(kUsage) where it is
// neither 0 nor 1. Ranks that differ are told by the first call.
bool proves_by_default();

// Collective. Compares this rank's share with its peers': a digest each way between any two ranks, in one exchange.
// What a rank finds, in its own program or between itself and a peer, is an Error(kInternal) on every rank: the fault
// would be annulus's own. Marks the share as shown.
void prove_together(const RankShare& share, const PlanRequest& request, Communicator& comm);

// Collective. Proves the plan of a request now, if not all ranks know that it is proved: calls of it then cost nothing
// more. Does nothing for adaptive patterns, whose plans are made and proved by each call. Raises as planning and
// prove_together do.
void prove_plan(const PlanRequest& request, Communicator& comm);

}  // namespace annulus
