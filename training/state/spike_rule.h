// The rule by which an update is left out because the norm of its gradient is far above what it has been:
// optimizer.spike of a configuration. Used by training.cc, which asks it on every rank with the same norms.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace annulus {

// Not thread-safe.
class SpikeRule {
 public:
  // `factor` 0: nothing is a spike, and nothing is kept. `window`: norms that the median is of.
  SpikeRule(double factor, int64_t window) : factor_(factor), window_(static_cast<size_t>(window)) {}

  // Of the last norms that were applied: the middle one, of an even number the mean of the two. Empty until there are
  // as many as the window holds.
  std::optional<double> median() const;
  bool is_spike(double norm) const;

  // After an update: its norm was applied, or it was a spike.
  void applied(double norm);
  void left_out() { ++spikes_; }
  int64_t spikes() const { return spikes_; }  // that were left out

  // For a checkpoint: JSON, empty where the rule is off.
  std::string text() const;
  // Takes the newest norms of a state; an empty one is that of a run that has not begun. Raises Error(kInput) for one
  // that is damaged, with nothing changed.
  void restore(const std::string& text);

 private:
  double factor_;
  size_t window_;
  std::deque<double> norms_;  // the newest last
  int64_t spikes_ = 0;
};

}  // namespace annulus
