// Proves a plan on all ranks together (attention/proof/verifier.h): each rank proves its own program and compares its
// transfers with what its peers say about the same transfers. Called by attention calls whose plan is not proved yet,
// and beforehand by `attend`, `logits` and the trainer.
#pragma once

#include "attention/plan/plan.h"
#include "attention/proof/proofs.h"
#include "comm/communicator.h"

namespace annulus {

// The default of AttentionCall::prove: true unless ANNULUS_PROVE is 0. Raises Error(kUsage) if the variable is neither
// 0 nor 1. If ranks differ in it, the first call raises an error on all of them.
bool proves_by_default();

// Collective. Compares this rank's share with the shares of its peers, in one exchange of a digest each way between any
// two ranks. If a rank finds a fault in its own program or between itself and a peer, every rank raises
// Error(kInternal), since the fault is one of annulus. Otherwise marks the share as shown.
void prove_together(const RankShare& share, const PlanRequest& request, Communicator& comm);

// Collective. Proves the plan of a request now, unless all ranks remember that it is proved, so that later calls need
// not. Does nothing for adaptive patterns, whose plans are made and proved by each call. Raises the errors of planning
// and of prove_together.
void prove_plan(const PlanRequest& request, Communicator& comm);

}  // namespace annulus
