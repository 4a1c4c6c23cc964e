// See optimizer.h.
#include "training/state/optimizer.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>
#include <utility>

#include "common/error.h"

namespace annulus {

namespace {

constexpr std::array<std::pair<std::string_view, RateSchedule>, 4> kSchedules = {{{"cosine", RateSchedule::kCosine},
                                                                                  {"linear", RateSchedule::kLinear},
                                                                                  {"constant", RateSchedule::kConstant},
                                                                                  {"wsd", RateSchedule::kWsd}}};

}  // namespace

RateSchedule parse_rate_schedule(std::string_view name) {
  for (const auto& [known, schedule] : kSchedules) {
    if (known == name) return schedule;
  }
  throw Error(ErrorKind::kUsage, "train",
              "optimizer.schedule: expected \"cosine\", \"linear\", \"constant\" or \"wsd\", got \"" +
                  std::string(name) + "\"");
}

std::string_view rate_schedule_name(RateSchedule schedule) { return kSchedules[static_cast<size_t>(schedule)].first; }

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
  std::array<char, 120> text{};
  std::snprintf(text.data(), text.size(), "the learning rate goes from %.2g to %.2g", was, is);
  if (before.schedule != now.schedule) {
    return text.data() + (": optimizer.schedule was \"" + std::string(rate_schedule_name(before.schedule)) + "\"");
  }
  if (before.steps == now.steps || now.schedule == RateSchedule::kConstant) return text.data();
  const std::string over =
      now.schedule == RateSchedule::kWsd ? "over the last " + std::to_string(now.decay) + " steps " : "";
  return text.data() + (": it decays " + over + "until run.steps, which was " + std::to_string(before.steps));
}

AdamW::AdamW(std::vector<Updated> updated, const OptimizerSettings& settings)
    : updated_(std::move(updated)), settings_(settings) {
  int64_t elements = 0;
  for (const Updated& u : updated_) elements += u.values.numel();
  if (updated_.empty()) return;
  // One vector each, cut as what is updated is.
  const at::Tensor means = at::zeros({2, elements}, updated_[0].values.options());
  int64_t begin = 0;
  for (const Updated& u : updated_) {
    exp_avg_.push_back(means[0].narrow(0, begin, u.values.numel()));
    exp_avg_sq_.push_back(means[1].narrow(0, begin, u.values.numel()));
    begin += u.values.numel();
  }
}

void AdamW::update(double scale, double norm, int64_t step) {
  ++updates_;
  if (updated_.empty()) return;
  const at::TensorOptions scalar = at::TensorOptions(at::kFloat).device(updated_[0].values.device());
  const at::Tensor count = at::full({}, static_cast<double>(updates_), scalar);
  // The fused step divides gradients by this while it reads them: scaling and clipping without a pass of their own.
  double divide = 1 / scale;
  if (settings_.clip > 0 && norm > settings_.clip) divide *= norm / settings_.clip;
  std::optional<at::Tensor> divisor;
  if (divide != 1) divisor = at::full({}, divide, scalar);
  for (const bool decays : {true, false}) {
    std::array<std::vector<at::Tensor>, 4> lists;
    for (size_t i = 0; i < updated_.size(); ++i) {
      const Updated& u = updated_[i];
      const int64_t begin = decays ? 0 : u.decayed, end = decays ? u.decayed : u.values.numel();
      if (begin == end) continue;
      size_t list = 0;
      for (const at::Tensor& t : {u.values, u.gradients, exp_avg_[i], exp_avg_sq_[i]}) {
        lists[list++].push_back(t.narrow(0, begin, end - begin));
      }
    }
    if (lists[0].empty()) continue;
    const std::vector<at::Tensor> counts(lists[0].size(), count);
    at::_fused_adamw_(lists[0], lists[1], lists[2], lists[3], /*max_exp_avg_sqs=*/{}, counts,
                      learning_rate(settings_, step), settings_.beta1, settings_.beta2,
                      decays ? settings_.weight_decay : 0, settings_.eps, /*amsgrad=*/false, /*maximize=*/false,
                      divisor, /*found_inf=*/std::nullopt);
  }
}

}  // namespace annulus
