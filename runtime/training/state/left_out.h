// Counts updates that are left out, and ends a run after too many of them in a row. training.cc uses it.
#pragma once

#include <cstdint>

namespace annulus {

// Not thread-safe.
class LeftOut {
 public:
  enum class Reason { kNoTarget, kNotFinite, kNotClipped, kSpike };

  // `most` is optimizer.skips.
  explicit LeftOut(int64_t most) : most_(most) {}

  // Says that the update of `step` (counted from 0) was applied. It ends a series of left-out updates, except while a
  // run that has returned to an earlier state repeats steps before the last one that was left out.
  void applied(int64_t step);
  // Says that the update of `step` was left out. Raises Error(kUsage) if it is the `most`-th in a row.
  void add(int64_t step, Reason reason);

  // Called at the end of a run. Raises Error(kUsage) if the last updates were left out, and at least as many of them as
  // were applied.
  void require_updates() const;

 private:
  [[noreturn]] void refuse() const;

  int64_t most_;
  int64_t applied_ = 0;
  int64_t in_a_row_ = 0;
  int64_t last_ = -1;  // the latest step whose update was left out
  Reason reason_ = Reason::kNotFinite;
};

}  // namespace annulus
