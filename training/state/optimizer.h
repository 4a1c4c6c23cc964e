// AdamW, clipping by the global norm, and the learning rate's schedule. Used by training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
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

// How elements are updated that have this in common.
struct Rates {
  double lr = 1;  // times that of the schedule
  double weight_decay = 0;

  friend bool operator==(const Rates&, const Rates&) = default;
};
// Elements [begin, end).
struct RatedRange {
  int64_t begin = 0, end = 0;
  Rates rates;

  friend bool operator==(const RatedRange&, const RatedRange&) = default;
};

// What an optimizer updates together: the values and gradients of a unit (model/parameters.h), or of a rank's part of
// it.
struct Updated {
  at::Tensor values, gradients;   // 1-D, as long as each other, fp32 or fp64
  std::vector<RatedRange> rated;  // all elements, one range behind the other
};

// AdamW (arXiv 1711.05101) as LibTorch's fused step, called once for all elements with the same rates. Each element's
// update depends on that element and its rates alone, and to the bit where vectors are multiples of 16 elements; ranges
// of rates may begin anywhere. Not thread-safe.
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
  // What the fused step takes, in the order of its arguments: values, gradients and both means.
  using Lists = std::array<std::vector<at::Tensor>, 4>;
  struct Group {
    Rates rates;
    Lists lists;  // whole blocks of 16 elements, of which the first has these rates
  };
  // Elements of such a block that have the rates of another group.
  struct Strays {
    size_t group = 0;
    std::array<at::Tensor, 4> block;
    int64_t begin = 0, end = 0;  // in the block
  };

  std::array<at::Tensor, 4> part(size_t of, int64_t begin, int64_t end) const;
  size_t group_of(const Rates& rates);

  std::vector<Updated> updated_;
  OptimizerSettings settings_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  std::vector<Group> groups_;
  std::vector<Strays> strays_;
  int64_t updates_ = 0;
};

}  // namespace annulus
