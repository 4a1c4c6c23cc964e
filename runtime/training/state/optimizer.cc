// See optimizer.h.
#include "runtime/training/state/optimizer.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

namespace annulus {

namespace {

// The most elements that a vector loop processes at once.
constexpr int64_t kBlock = 16;

int64_t filled_up(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

}  // namespace

double gradient_divisor(const OptimizerSettings& settings, double scale, double norm) {
  const double divisor = 1 / scale;
  return settings.clip > 0 && norm > settings.clip ? divisor * (norm / settings.clip) : divisor;
}

double largest_divisor(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
}

AdamW::AdamW(std::vector<Updated> updated, const OptimizerSettings& settings)
    : updated_(std::move(updated)), settings_(settings) {
  int64_t elements = 0;
  for (const Updated& u : updated_) elements += u.values.numel();
  if (updated_.empty()) return;
  // Each moment is one vector, divided like what is updated.
  const at::Tensor means = at::zeros({2, elements}, updated_[0].values.options());
  int64_t begin = 0;
  for (const Updated& u : updated_) {
    exp_avg_.push_back(means[0].narrow(0, begin, u.values.numel()));
    exp_avg_sq_.push_back(means[1].narrow(0, begin, u.values.numel()));
    begin += u.values.numel();
  }
  for (size_t i = 0; i < updated_.size(); ++i) {
    const int64_t count = updated_[i].values.numel();
    for (const RatedRange& range : updated_[i].rated) {
      const size_t group = group_of(range.rates);
      // A block belongs to the range that contains its first element; its elements in other ranges are strays.
      const int64_t first = filled_up(range.begin), last = std::min(filled_up(range.end), count);
      if (first < last) {
        const std::array<at::Tensor, 4> blocks = part(i, first, last);
        for (size_t list = 0; list < blocks.size(); ++list) groups_[group].lists[list].push_back(blocks[list]);
      }
      if (range.begin == first) continue;
      const int64_t block = first - kBlock;
      strays_.push_back({.group = group,
                         .block = part(i, block, std::min(first, count)),
                         .begin = range.begin - block,
                         .end = std::min(first, range.end) - block});
    }
  }
}

// Returns elements [begin, end) of updated_[of] for each argument of the fused step.
std::array<at::Tensor, 4> AdamW::part(size_t of, int64_t begin, int64_t end) const {
  const auto cut = [&](const at::Tensor& t) { return t.narrow(0, begin, end - begin); };
  return {cut(updated_[of].values), cut(updated_[of].gradients), cut(exp_avg_[of]), cut(exp_avg_sq_[of])};
}

size_t AdamW::group_of(const Rates& rates) {
  const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return g.rates == rates; });
  if (found != groups_.end()) return static_cast<size_t>(found - groups_.begin());
  groups_.push_back({.rates = rates, .lists = {}});
  return groups_.size() - 1;
}

void AdamW::update(double scale, double norm, int64_t step) {
  ++updates_;
  if (updated_.empty()) return;
  const at::TensorOptions scalar = at::TensorOptions(at::kFloat).device(updated_[0].values.device());
  const at::Tensor count = at::full({}, static_cast<double>(updates_), scalar);
  // The fused step divides gradients by this number while it reads them, so scaling and clipping need no separate pass.
  // It reads the number as fp32, however, whose rounding is none of fp64's: such gradients are divided before.
  const double divide = gradient_divisor(settings_, scale, norm);
  std::optional<at::Tensor> divisor;
  if (divide != 1 && updated_[0].values.scalar_type() == at::kDouble) {
    for (const Updated& u : updated_) at::Tensor(u.gradients).div_(divide);
  } else if (divide != 1) {
    divisor = at::full({}, divide, scalar);
  }
  // Strays are updated in a copy of their block, at the same positions as in the block itself.
  std::vector<std::array<at::Tensor, 4>> copies;
  for (const Strays& strays : strays_) {
    copies.emplace_back();
    for (size_t list = 0; list < strays.block.size(); ++list) copies.back()[list] = strays.block[list].clone();
  }
  const double lr = learning_rate(settings_, step);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Lists lists = groups_[g].lists;
    for (size_t i = 0; i < strays_.size(); ++i) {
      if (strays_[i].group != g) continue;
      for (size_t list = 0; list < lists.size(); ++list) lists[list].push_back(copies[i][list]);
    }
    if (lists[0].empty()) continue;
    const Rates& rates = groups_[g].rates;
    const std::vector<at::Tensor> counts(lists[0].size(), count);
    at::_fused_adamw_(lists[0], lists[1], lists[2], lists[3], /*max_exp_avg_sqs=*/{}, counts, rates.lr * lr,
                      settings_.beta1, settings_.beta2, rates.weight_decay, settings_.eps, /*amsgrad=*/false,
                      /*maximize=*/false, divisor, /*found_inf=*/std::nullopt);
  }
  // The moments do not depend on rates, so the block itself already has the right ones.
  for (size_t i = 0; i < strays_.size(); ++i) {
    const Strays& strays = strays_[i];
    const int64_t n = strays.end - strays.begin;
    at::Tensor(strays.block[0]).narrow(0, strays.begin, n).copy_(copies[i][0].narrow(0, strays.begin, n));
  }
}

}  // namespace annulus
