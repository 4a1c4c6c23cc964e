// What every rank of a training job does in its steps: how long it computes, what it waits for, its tokens, its memory
// and the clock of its processor. The numbers of all ranks travel in the one small collective of a step
// (Training::step), so that rank 0 can write the least, the median and the most of each to metrics.jsonl, and name a
// rank that is slow (runtime/run/stragglers.h). Used by run_report.h. Not thread safe.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "runtime/config/config.h"
#include "runtime/run/metrics.h"
#include "runtime/run/stragglers.h"
#include "runtime/training/training.h"

namespace annulus {

// Seconds on the clock of a rank, and the parts of them for which its steps have waited. The waits for other ranks are
// those of the host on a CPU, and of the compute stream on a GPU.
struct TrainingClock {
  double time = 0;
  double waited = 0;                           // for other ranks
  double ring = 0, reduced = 0, gathered = 0;  // parts of `waited`
  double planned = 0, read = 0, offload = 0;

  static TrainingClock now(const Communicator& world, Training& training);
  // The rank's own work; what is exposed is none.
  double compute() const { return time - waited - planned - read - offload; }

  TrainingClock& operator+=(const TrainingClock& other);
  friend TrainingClock operator-(TrainingClock a, const TrainingClock& b);
};

// A rank that has become slow, or whose link to the next rank has; or that is so no longer.
struct SlowRank {
  Stragglers::Change change;
  std::string host;
  std::string waited_for;           // "data 12 %, plans 3 %" of its time, or "nothing"; empty for a link
  std::string text;                 // for the log
  std::optional<int> link_to = {};  // for a link: the rank at its end; `excess` is then what the ranks wait

  MetricsWriter::Fields fields() const;
};

class RankMetrics {
 public:
  // Collective: rank 0 learns the names of the hosts.
  RankMetrics(const Config& config, Communicator& world, Training& training, at::Device device);

  // This rank's numbers for Training::step, where `clock` has what its steps took so far. Files of the kernel, the
  // device and what holds memory are asked at most once a second.
  Training::Carried sample(const TrainingClock& clock);

  // Whether the ranks that contributed this to a step are to measure their links now. The same on all ranks: rank 0
  // asks once all ranks wait for each other and none of them is slow, as they do for a slow link.
  static bool asks_for_probe(const std::vector<Training::Carried>& of_ranks);

  // ---- On rank 0

  // Takes what the ranks have contributed to a step; returns the ranks that have become slow, or are so no longer.
  std::vector<SlowRank> step(int64_t step, std::vector<Training::Carried> of_ranks);
  // Takes what probe_links returned after a step. A link is slow if three probes in a row say so.
  std::vector<SlowRank> probed(const std::vector<double>& links);
  // Adds the keys "ranks" and "rank_compute_seconds" for the time since the last call.
  void add_fields(MetricsWriter::Fields& fields);
  // Begins anew after a return to an earlier step, with what the ranks had contributed to the last one.
  void forget(std::vector<Training::Carried> of_ranks);
  const std::vector<std::string>& hosts() const { return hosts_; }  // by rank

 private:
  SlowRank describe(const Stragglers::Change& change) const;
  int next_rank(size_t rank) const { return static_cast<int>((rank + 1) % hosts_.size()); }
  // Decides whether to ask for a probe; returns a slow link that is over.
  std::vector<SlowRank> look_at_links();

  Training& training_;
  at::Device device_;
  std::vector<std::string> hosts_;
  double flops_per_token_;  // without attention
  double asked_at_ = -1;    // seconds on the clock
  // Bytes when the kernel, the pool and the training were last asked.
  int64_t memory_ = 0, caches_ = 0, pool_ = 0, pool_cached_ = 0;
  HeldBytes held_;
  double mhz_ = 0;
  Stragglers stragglers_;
  size_t window_;
  double share_;              // of its time for which every rank waits for others where a link may be slow; 0: never
  std::vector<int> host_of_;  // by rank: a number of its host
  bool all_wait_ = false;
  int64_t wait_since_ = 0;      // the first step of the window in which they did
  bool asks_ = false;           // the next step is to carry that rank 0 asks for a probe
  int said_ = 0;                // how many probes in a row have named `link_`
  std::optional<size_t> link_;  // from this rank to the next
  // Of the last steps, the newest behind; one more than the window. Steps that are shorter than seconds_ are joined
  // until they are as long, so that a window has run.slow_seconds at least.
  std::deque<std::vector<Training::Carried>> last_;
  std::deque<int64_t> begins_;  // the first step of each in the window
  double seconds_;
  int64_t first_ = -1;                      // of the steps that are to be joined; -1: there are none
  std::vector<Training::Carried> now_;      // of the last step
  std::vector<Training::Carried> written_;  // those of the last line
};

}  // namespace annulus
