// See optimizer.h.
#include "training/optimizer.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <optional>

namespace annulus {

double learning_rate(const OptimizerSettings& s, int64_t step) {
  if (step < s.warmup) return s.lr * static_cast<double>(step + 1) / static_cast<double>(s.warmup);
  const double span = static_cast<double>(std::max<int64_t>(1, s.steps - s.warmup));
  const double done = std::min(1.0, static_cast<double>(step - s.warmup) / span);
  return s.lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * 0.5 * (1 + std::cos(std::numbers::pi * done)));
}

std::string learning_rate_change(const OptimizerSettings& before, const OptimizerSettings& now, int64_t step) {
  const double was = learning_rate(before, step), is = learning_rate(now, step);
  if (std::abs(is - was) <= 0.01 * was) return "";
  std::array<char, 120> text{};
  std::snprintf(text.data(), text.size(), "the learning rate goes from %.2g to %.2g", was, is);
  const std::string steps = ": it decays until run.steps, which was " + std::to_string(before.steps);
  return text.data() + (before.steps != now.steps ? steps : "");
}

Charge optimizer_charge(int64_t count, at::ScalarType dtype) {
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  return {"optimizer", 2 * count * wide, When::kLasts};
}

AdamW::AdamW(Parameters& parameters, const OptimizerSettings& settings)
    : parameters_(parameters),
      settings_(settings),
      exp_avg_(at::zeros_like(parameters.values())),
      exp_avg_sq_(at::zeros_like(parameters.values())) {}

at::Tensor AdamW::gradient_norm() const { return at::linalg_vector_norm(parameters_.gradients()); }

void AdamW::update(double scale, double norm, int64_t step) {
  ++updates_;
  const Parameters& p = parameters_;
  const at::TensorOptions scalar = at::TensorOptions(at::kFloat).device(p.values().device());
  const at::Tensor count = at::full({}, static_cast<double>(updates_), scalar);
  // The fused step divides gradients by this while it reads them: scaling and clipping without a pass of their own.
  double divide = 1 / scale;
  if (settings_.clip > 0 && norm > settings_.clip) divide *= norm / settings_.clip;
  std::optional<at::Tensor> divisor;
  if (divide != 1) divisor = at::full({}, divide, scalar);
  const auto part = [&](int64_t begin, int64_t end, double decay) {
    if (begin == end) return;
    const auto cut = [&](const at::Tensor& t) { return std::vector<at::Tensor>{t.narrow(0, begin, end - begin)}; };
    at::_fused_adamw_(cut(p.values()), cut(p.gradients()), cut(exp_avg_), cut(exp_avg_sq_), /*max_exp_avg_sqs=*/{},
                      {count}, learning_rate(settings_, step), settings_.beta1, settings_.beta2, decay, settings_.eps,
                      /*amsgrad=*/false, /*maximize=*/false, divisor, /*found_inf=*/std::nullopt);
  };
  part(0, p.decayed(), settings_.weight_decay);
  part(p.decayed(), p.count(), 0);
  parameters_.refresh_leaves();
}

}  // namespace annulus
