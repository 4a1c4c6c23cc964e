// Finds the ranks of a job that need longer for their steps than the others without having more to do: slow processors,
// hot or shared ones. A rank that is late makes all others wait, so the length of a step tells nothing about who is
// slow; what each rank needs by itself does. Used by runtime/training/rank_metrics.h on rank 0. Not thread safe; needs
// no LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace annulus {

// One rank's part of a step.
struct RankStep {
  double seconds = 0;    // of the step, less what the rank waited for other ranks
  double tokens = 0;     // FLOPs in proportion to its tokens
  double attention = 0;  // FLOPs of attention as planned
};

// A step's excess of a rank is by how much its seconds are above the median of the other ranks' seconds (of two middle
// ones the larger), as a share of that, once all are divided by what each rank has to compute. Where ranks have unequal
// parts it is the least excess that any speed of attention from an eighth to eight times that of the rest gives,
// because those speeds are not known: a rank is not called slow for what the plan gives it.
//
// A rank becomes slow when in a window of the last Settings::steps steps the median of its excess is above
// Settings::share, and nine tenths of its excesses are above half of that, so that a pause or two do not count. So that
// noise does not count, the median must be above the share by more than it may be off, and above 0 by five times that:
// this follows from how much ranks vary from step to step (the median of that, as logarithms, in this window or, if it
// is more, on average in those before). It stops being slow when the median is below half of the share.
class Stragglers {
 public:
  struct Settings {
    double share = 0.2;  // 0: no rank is ever slow
    int64_t steps = 10;
  };
  struct Change {
    int rank = 0;
    bool slow = true;   // false: no longer
    double excess = 0;  // the median of the window
    int64_t since = 0;  // the first step of the window that was above half of that; of a change to slow
  };

  explicit Stragglers(const Settings& settings) : settings_(settings) {}

  // Adds a step, the same number of ranks each time; returns what has changed, by rank. A rank without seconds (0)
  // takes part in nothing.
  std::vector<Change> add(int64_t step, const std::vector<RankStep>& ranks);
  bool any_slow() const;
  // Forgets the window, for steps that are not like those before. Slow ranks stay slow until a whole window says
  // otherwise.
  void forget() { filled_ = 0; }

 private:
  struct History {
    std::vector<double> excess;  // of the window, a ring
    bool slow = false;
  };

  // By how much the ranks vary in the window.
  double noise() const;

  Settings settings_;
  std::vector<History> ranks_;
  std::vector<int64_t> steps_;  // of the window, a ring
  size_t next_ = 0;             // the place in the rings of the next step
  size_t filled_ = 0;
  std::optional<double> noise_;  // a running mean over windows
};

// Returns the excess of each rank in a step.
std::vector<double> excesses(const std::vector<RankStep>& ranks);

// Returns the link that takes at least four times as long as the median of the others of its kind (inside a host,
// between hosts), and two milliseconds longer; the slowest if there are several, nothing if there is none. seconds[i]
// are those of a message from rank i to the next one, the last to rank 0 (comm/link_probe.h); host[i] is a number of
// rank i's host.
std::optional<size_t> slow_link(const std::vector<double>& seconds, const std::vector<int>& host);

}  // namespace annulus
