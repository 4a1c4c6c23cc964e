// Decides whether an update is left out because its gradient norm is far above the usual one (optimizer.spike).
// training.cc uses it on every rank with the same norms, so all ranks decide alike.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace annulus {

// Not thread-safe.
class SpikeRule {
 public:
  // If `factor` is 0, nothing is a spike and nothing is kept. `window` is the number of norms that the median is of.
  SpikeRule(double factor, int64_t window) : factor_(factor), window_(static_cast<size_t>(window)) {}

  // Returns the median of the last `window` applied norms (for an even number the mean of the middle two), or nothing
  // until there are that many.
  std::optional<double> median() const;
  bool is_spike(double norm) const;

  // Called after an update was applied, or left out as a spike.
  void applied(double norm);
  void left_out() { ++spikes_; }
  int64_t spikes() const { return spikes_; }  // the number of updates left out

  // Returns the state for a checkpoint as JSON, or an empty string if the rule is off.
  std::string text() const;
  // Takes over a state from text(), of which it keeps the newest norms; an empty text is the state of a new run. Raises
  // Error(kInput) and changes nothing if it is damaged.
  void restore(const std::string& text);

 private:
  double factor_;
  size_t window_;
  std::deque<double> norms_;  // the newest last
  int64_t spikes_ = 0;
};

}  // namespace annulus
