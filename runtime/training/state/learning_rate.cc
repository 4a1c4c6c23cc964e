// See learning_rate.h.
#include "runtime/training/state/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

#include "common/names.h"
#include "common/text.h"

namespace annulus {
namespace {

// In the order of RateSchedule.
const std::vector<std::string>& names() {
  static const std::vector<std::string> names = {"cosine", "linear", "constant", "wsd"};
  return names;
}

}  // namespace

RateSchedule parse_rate_schedule(std::string_view name) {
  return static_cast<RateSchedule>(index_of_name(name, names(), "schedule", "optimizer.schedule"));
}

std::string_view rate_schedule_name(RateSchedule schedule) { return names()[static_cast<size_t>(schedule)]; }

double learning_rate(const OptimizerSettings& s, int64_t step) {
  if (step < s.warmup) return s.lr * static_cast<double>(step + 1) / static_cast<double>(s.warmup);
  const int64_t falls = s.schedule == RateSchedule::kWsd ? std::max(s.warmup, s.steps - s.decay) : s.warmup;
  if (s.schedule == RateSchedule::kConstant || step < falls) return s.lr;
  const double span = static_cast<double>(std::max<int64_t>(1, s.steps - falls));
  const double done = std::min(1.0, static_cast<double>(step - falls) / span);
  if (s.schedule != RateSchedule::kCosine) return s.lr * (1 - (1 - s.min_lr_ratio) * done);
  return s.lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * done)));
}

std::string learning_rate_change(const OptimizerSettings& before, const OptimizerSettings& now, int64_t step) {
  const double was = learning_rate(before, step), is = learning_rate(now, step);
  if (std::abs(is - was) <= 0.01 * was) return "";
  const std::string text = "the learning rate goes from " + significant(was, 2) + " to " + significant(is, 2);
  if (before.schedule != now.schedule) {
    return text + ": optimizer.schedule was \"" + std::string(rate_schedule_name(before.schedule)) + "\"";
  }
  if (before.steps == now.steps || now.schedule == RateSchedule::kConstant) return text;
  const std::string over =
      now.schedule == RateSchedule::kWsd ? "over the last " + with_commas(now.decay, "step") + " " : "";
  return text + ": it decays " + over + "until run.steps, which was " + with_commas(before.steps);
}

}  // namespace annulus
