// What each rank has proved of its own part of a plan (verifier.h), kept by request: the share of one rank, which
// attention compares with its peers' (execution/prove.h). Used by attention and by the trainer, which proves the plans
// of its next step on the thread that makes them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/plan/verifier.h"

namespace annulus {

struct RankShare {
  Proof proof;                               // of this rank's program alone
  std::vector<PairDigest> sent, received;    // by peer
  std::shared_ptr<std::atomic<bool>> shown;  // all ranks have compared: the plan is proved
};

RankShare prove_share(const Program& program, const Pattern& pattern);

// Of the program of a request's pattern, which cached_program gave; kept (memory/caches.h) and made once. Where it is
// not kept any more it is made anew, not shown. Thread-safe.
std::shared_ptr<const RankShare> cached_share(const PlanRequest& request, const Program& program);

// plan_ahead, and cached_share of what it made, on the same thread.
void plan_and_prove_ahead(const PlanRequest& request, int rank);

}  // namespace annulus
