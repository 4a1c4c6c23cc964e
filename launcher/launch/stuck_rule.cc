// See stuck_rule.h.
#include "launcher/launch/stuck_rule.h"

#include <algorithm>

namespace annulus {

std::optional<double> StuckRule::look(const RankGlance& now, double elapsed) {
  const RankGlance before = last_.value_or(now);
  const bool first = !last_;
  last_ = now;
  stopped_ = now.stopped ? stopped_ + elapsed : 0;
  if (first || now.own != before.own || (before.waits && now.others != before.others)) {
    // While the process was stopped or waited for others, the time says nothing about its pieces of work.
    if (!before.lasting && !before.stopped && !before.waits_for_ranks) longest_ = std::max(longest_, still_);
    still_ = 0;
  } else {
    still_ += elapsed;
  }
  if (stopped_ >= after_) return std::max(stopped_, still_);
  const double most = std::max(after_ * (now.lasting ? kLasting : 1), kLonger * longest_);
  if (now.expected && !now.waits_for_ranks && still_ >= most) return still_;
  return std::nullopt;
}

}  // namespace annulus
