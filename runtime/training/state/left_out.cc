// See left_out.h.
#include "runtime/training/state/left_out.h"

#include <algorithm>
#include <string>

#include "common/error.h"
#include "common/text.h"

namespace annulus {

void LeftOut::applied(int64_t step) {
  ++applied_;
  if (step >= last_) in_a_row_ = 0;
}

void LeftOut::add(int64_t step, Reason reason) {
  last_ = std::max(last_, step);
  reason_ = reason;
  if (++in_a_row_ >= most_) refuse();
}

void LeftOut::require_updates() const {
  if (in_a_row_ > 0 && in_a_row_ >= applied_) refuse();
}

void LeftOut::refuse() const {
  const char* what = "no target counted in ";
  const char* advice = "data.ignore and the marks of the shards leave nothing to learn from";
  if (reason_ == Reason::kNotFinite) {
    what = "the loss or the gradients were not finite in ";
    advice = "Lower optimizer.lr or lengthen optimizer.warmup";
  } else if (reason_ == Reason::kNotClipped) {
    what = "the gradient norm was too far above optimizer.clip to be clipped in ";
    advice = "Raise optimizer.clip, or lower optimizer.lr";
  } else if (reason_ == Reason::kSpike) {
    what = "the gradient norm was above optimizer.spike times its running median in ";
    advice = "Raise optimizer.spike, lower optimizer.lr, or look at the data there";
  }
  throw Error(ErrorKind::kUsage, "train",
              what + counted(in_a_row_, "step") + (in_a_row_ > 1 ? " in a row, the last at step " : ", at step ") +
                  std::to_string(last_ + 1) + "; such updates are not applied. " + advice);
}

}  // namespace annulus
