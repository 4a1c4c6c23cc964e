// Makes and caches, by request, what a rank has proved about its own part of a plan (verifier.h). This is the rank's
// share of the proof, which attention compares with the shares of its peers (attention/execution/prove.h). Used by
// attention and by the trainer, which proves the plans of its next step on the thread that makes them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/verifier.h"

namespace annulus {

struct RankShare {
  Proof proof;                               // the proof of this rank's program alone
  std::vector<PairDigest> sent, received;    // by peer
  std::shared_ptr<std::atomic<bool>> shown;  // true once all ranks have compared their shares and the plan is proved
};

// Proves one rank's share without the cache. The proof may contain faults. Thread safe.
RankShare prove_share(const Program& program, const Pattern& pattern);

// The share for a program that cached_program returned for this request, from the cache "proofs" (memory/caches.h),
// which makes it if it is missing. A share that the cache has dropped is made anew with `shown` false. Thread safe.
std::shared_ptr<const RankShare> cached_share(const PlanRequest& request, const Program& program);

// Calls plan_ahead, and cached_share for the program on the planning thread. Thread safe.
void plan_and_prove_ahead(const PlanRequest& request, int rank);

}  // namespace annulus
