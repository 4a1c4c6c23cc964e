// What of a configuration fits into the memory of a rank: at each level of optimizer.shard, with recomputation and
// without, and how long rows could be. By memory plans (memory_plan.h) of configurations that differ in nothing else,
// so that no memory of a model is taken and the ranks need not be there. Used by `annulus plan --model`, and by the
// trainer, whose refusal of what does not fit says what would. Thread safety: free functions without state.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "training/memory_plan.h"

namespace annulus {

// The ranks to plan for.
struct FitRanks {
  int ranks = 1;
  int ranks_of_a_host = 1;
  RanksAre are = RanksAre::kGpus;
  double memory = 0;  // bytes that each may take
  // The rank of the context axis that is planned; none: one that needs the most, of all or, where there are many, of
  // the first, the middle and the last. In the layouts zigzag and striped all need as much but for a row.
  std::optional<int> planned = {};
};

// Rows are looked for up to this many tokens.
inline constexpr int64_t kLongestPlanned = int64_t{1} << 27;

// One level, with recomputation or without.
struct Fit {
  int level = 0;
  bool recompute = false;
  MemoryKinds bytes = {};  // with rows as configured
  bool fits = false;
  // Tokens of the longest rows that fit, a multiple of twice the ranks of the context axis; 0: none do. The plan of
  // these fits, and that of rows of one multiple more does not, unless that would be beyond kLongestPlanned. None where
  // the configuration cannot be planned with rows of other lengths (a block map of a file is of one length).
  std::optional<int64_t> longest = {};
};

// Bytes that a rank sends in a step for gradients and weights, on average over the shards of one replica.
struct FitTraffic {
  int level = 0;
  double reduced = 0, gathered = 0;
};

struct FitTable {
  int64_t parameters = 0;
  int data = 1, context = 1;     // ranks of the mesh's axes
  int shards = 1, replicas = 1;  // training/state/sharding.h
  int planned = 0;               // the rank of the context axis that was planned
  int64_t caches = 0, caches_on_device = 0;
  bool selects_what_travels = false;     // MemoryPlan's
  std::vector<Fit> fits = {};            // of level 0 without and with recomputation, of level 1, ...
  std::vector<FitTraffic> traffic = {};  // of each level
};

// Levels that would be the same, with one rank to hold the state, are there once. Of a schedule of lengths `bytes` are
// those of the stage that takes the most, and `longest` is one length for the whole run, with the rows of the longest
// stage. Raises what check_training raises, and Error(kResource) for sizes that no machine has. `progress` is told what
// is being planned.
FitTable what_fits(const Config& config, const FitRanks& ranks,
                   const std::function<void(const std::string&)>& progress = nullptr);

// What changes the least of a configuration and fits: itself, a higher level, recomputation, both, or rows that are
// shorter at the highest level with recomputation.
struct NearestFit {
  bool found = false;
  int level = 0;
  bool recompute = false;
  ContextSchedule context = {};
  // "optimizer.shard = 2 fits (61.2 GB a rank)"; where nothing does, what forbids it.
  std::string text = {};
};
NearestFit nearest_fit(const Config& config, const FitRanks& ranks);

}  // namespace annulus
