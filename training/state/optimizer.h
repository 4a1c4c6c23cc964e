// AdamW, clipping by the global norm, and the learning rate's schedule. Used by training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace annulus {

// How the learning rate goes on behind the warm-up; see learning_rate().
enum class RateSchedule { kCosine, kLinear, kConstant, kWsd };
// "cosine", "linear", "constant", "wsd". Raises Error(kUsage) for any other name.
RateSchedule parse_rate_schedule(std::string_view name);
std::string_view rate_schedule_name(RateSchedule schedule);

struct OptimizerSettings {
  RateSchedule schedule = RateSchedule::kCosine;
  double lr = 1e-3;
  double min_lr_ratio = 0.1;
  int64_t warmup = 0;  // steps
  int64_t decay = 0;   // steps of the last phase of kWsd
  int64_t steps = 1;   // of the whole run
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;  // global norm; 0: none
};

// Of step 0, 1, ...: linear warm-up to lr over `warmup` steps, then by the schedule: half a cosine (kCosine) or a line
// (kLinear) down to lr * min_lr_ratio at `steps`, lr (kConstant), or lr until `decay` steps before `steps`, but no less
// than until the warm-up's end, and from there a line as before (kWsd). Behind `steps` it stays as it is there.
double learning_rate(const OptimizerSettings& settings, int64_t step);
// What becomes of it when a run goes on after `step` steps with other settings, where that is more than 1 %: "the
// learning rate goes from 0.00012 to 0.00023: it decays until run.steps, which was 600"; else "".
std::string learning_rate_change(const OptimizerSettings& before, const OptimizerSettings& now, int64_t step);

// What an optimizer updates together: the values and gradients of a unit (model/parameters.h), or of a rank's part of
// it.
struct Updated {
  at::Tensor values, gradients;  // 1-D, as long as each other, fp32 or fp64
  int64_t decayed = 0;           // elements at the beginning that have weight decay
};

// AdamW (arXiv 1711.05101) as LibTorch's fused step; decay for matrices alone. Each element's update depends on that
// element alone, and to the bit where vectors and the decayed parts of them are multiples of 16 elements. Not
// thread-safe.
class AdamW {
 public:
  // The tensors of `updated` must stay as they are.
  AdamW(std::vector<Updated> updated, const OptimizerSettings& settings);

  // Updates the values from the gradients times `scale`, whose norm is `norm`: they are scaled down further where that
  // is above the clip (the gradients may be overwritten). The caller has made sure that scale and norm are finite.
  void update(double scale, double norm, int64_t step);

  // What a checkpoint keeps: vectors like those updated, and the number of updates made (bias correction).
  const std::vector<at::Tensor>& exp_avg() const { return exp_avg_; }
  const std::vector<at::Tensor>& exp_avg_sq() const { return exp_avg_sq_; }
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  std::vector<Updated> updated_;
  OptimizerSettings settings_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  int64_t updates_ = 0;
};

}  // namespace annulus
