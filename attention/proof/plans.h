// RankPlan: what a rank has worked out about a request, once for all calls that make it: its program, its share of the
// proof, and the digest by which ranks compare what they are about to run. Plans are cached by their requests, and
// made ahead of their step on another thread. Used by attention, by memory plans and by whoever reports on planning.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "attention/plan/plan.h"
#include "attention/proof/verifier.h"
#include "common/checksum.h"
#include "memory/byte_cache.h"

namespace annulus {

// What one rank contributes to the proof of a plan; attention compares it with the shares of its peers
// (attention/execution/prove.h).
struct RankShare {
  Proof proof;                             // the proof of this rank's program alone; it may contain faults
  std::vector<PairDigest> sent, received;  // by peer
};

// One rank's plan of a request. Immutable but for its proof. Thread safe.
class RankPlan {
 public:
  // `program` is what make_program returned for the request.
  RankPlan(const PlanRequest& request, Program program);

  // Of the request's text, and of that with the schedule that `auto` stands for. Ranks whose plans have equal digests
  // have the plans of one request.
  const Digest digest;
  const Program program;

  // Makes the rank's share of the proof unless it is made. `pattern` is the one that the program was made for, if it
  // is not cached_pattern(program.request). Raises what make_pattern raises.
  const RankShare& share(const Pattern* pattern = nullptr) const;

  // Whether all ranks have compared their shares, and the plan is proved.
  mutable std::atomic<bool> proved = false;

 private:
  mutable std::mutex mutex_;
  mutable std::optional<RankShare> share_;
};

// The request and rank by which a cache finds a plan.
struct PlanKey {
  PlanRequest request;
  int rank = 0;

  uint64_t hash() const;
  int64_t bytes() const;
  friend bool operator==(const PlanKey&, const PlanKey&) = default;
};

// The plan of a request, from the cache "programs" (memory/caches.h), which makes it if it is missing: then it is not
// proved yet. Raises what make_program raises. Thread safe.
std::shared_ptr<const RankPlan> cached_plan(const PlanRequest& request, int rank);

// Starts on another thread to make the plan of a request that a later call will make and, if it is to be proved, this
// rank's share of the proof. cached_plan then finds the plan or waits until it is made, and raises the error if
// planning failed. Does nothing for adaptive patterns, which each call plans. Thread safe.
void plan_ahead(const PlanRequest& request, int rank, bool prove);

// What planning has done in this process so far.
struct PlanStats {
  int64_t patterns_made = 0;  // how often slices were made; a step whose patterns are unchanged adds nothing
  int64_t programs_made = 0;
  int64_t shares_made = 0;     // of proofs
  double seconds_on_path = 0;  // how long steps planned or waited for a plan, including the selection of blocks
  CacheStats programs;
};
PlanStats plan_stats();

// Adds the time for which an object of this class exists to PlanStats::seconds_on_path.
class PlanningTime {
 public:
  PlanningTime();
  ~PlanningTime();
  PlanningTime(const PlanningTime&) = delete;
  PlanningTime& operator=(const PlanningTime&) = delete;

 private:
  const double begin_;
};

// The bytes that a plan occupies in the host's memory.
int64_t plan_bytes(const RankPlan& plan);

}  // namespace annulus
