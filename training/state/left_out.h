// Updates that are left out: how many in a row, and when that is the end of a run. Used by training.cc.
#pragma once

#include <cstdint>

namespace annulus {

// Not thread-safe.
class LeftOut {
 public:
  enum class Reason { kNoTarget, kNotFinite, kSpike };

  // `most`: optimizer.skips.
  explicit LeftOut(int64_t most) : most_(most) {}

  // Of a step, from 0. One that is made again, after a return to an earlier state, ends no row that reached further.
  void applied(int64_t step);
  // Raises Error(kUsage) when it is the `most`-th in a row.
  void add(int64_t step, Reason reason);

  // At the end of a run: raises Error(kUsage) where the last updates were left out, and as many as were applied.
  void require_updates() const;

 private:
  [[noreturn]] void refuse() const;

  int64_t most_;
  int64_t applied_ = 0;
  int64_t in_a_row_ = 0;
  int64_t last_ = -1;  // step that was left out
  Reason reason_ = Reason::kNotFinite;
};

}  // namespace annulus
