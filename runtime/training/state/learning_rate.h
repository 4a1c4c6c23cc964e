// The settings of the optimizer, and the learning rate that follows from them at each step. Used by the optimizer, by
// training.cc, and by trainer.cc, which tells the user how the learning rate of a resumed run changes. Thread safety:
// no state.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace annulus {

// How the learning rate continues after the warm-up; see learning_rate().
enum class RateSchedule { kCosine, kLinear, kConstant, kWsd };
// Knows "cosine", "linear", "constant" and "wsd". Raises Error(kUsage) for any other name.
RateSchedule parse_rate_schedule(std::string_view name);
std::string_view rate_schedule_name(RateSchedule schedule);

struct OptimizerSettings {
  RateSchedule schedule = RateSchedule::kCosine;
  double lr = 1e-3;
  double min_lr_ratio = 0.1;
  int64_t warmup = 0;  // steps
  int64_t decay = 0;   // number of steps of the last phase of kWsd
  int64_t steps = 1;   // of the whole run
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;  // the largest global norm; 0: no clipping
};

// Returns the learning rate of step 0, 1, ... It rises linearly to lr over the first `warmup` steps. Then
// - kCosine: half a cosine down to lr * min_lr_ratio at `steps`,
// - kLinear: a line down to the same,
// - kConstant: lr,
// - kWsd: lr until `decay` steps before `steps` (but at least until the end of the warm-up), then a line as in kLinear.
// After `steps` it keeps its last value. Example: with lr 1, warmup 2, steps 12, min_lr_ratio 0 and kLinear, steps 0,
// 1, 2, 7 and 12 have 0.5, 1, 1, 0.5 and 0.
double learning_rate(const OptimizerSettings& settings, int64_t step);
// Returns how the learning rate changes when a run continues after `step` steps with other settings: "the learning rate
// goes from 0.00012 to 0.00023: it decays until run.steps, which was 600". Empty for a change of at most 1 %.
std::string learning_rate_change(const OptimizerSettings& before, const OptimizerSettings& now, int64_t step);

}  // namespace annulus
