// Makes and caches, by request, a rank's share of the proof of a plan (verifier.h): the proof of its own program, and
// the digests of its transfers, which attention compares with those of its peers (attention/execution/prove.h). Used by
// attention and by the trainer, which proves the plans of its next step on the planning thread.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/verifier.h"

namespace annulus {

struct RankShare {
  Proof proof;                               // of this rank's program alone
  std::vector<PairDigest> sent, received;    // by peer
  std::shared_ptr<std::atomic<bool>> shown;  // true once all ranks have compared their shares without a fault
};

// Makes one rank's share without the cache. The proof may contain faults. Thread safe.
RankShare prove_share(const Program& program, const Pattern& pattern);

// Returns the share for a program that cached_program returned for this request, from the cache "proofs"
// (memory/caches.h), which makes it if missing. An evicted share is made anew with `shown` false. Thread safe.
std::shared_ptr<const RankShare> cached_share(const PlanRequest& request, const Program& program);

// Calls plan_ahead, and cached_share on the planning thread. Thread safe.
void plan_and_prove_ahead(const PlanRequest& request, int rank);

}  // namespace annulus
