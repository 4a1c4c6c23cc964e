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

#include "memory/storage_bytes.h"

namespace annulus {

namespace {

// The most elements that a vector loop processes at once.
constexpr int64_t kBlock = 16;

int64_t filled_up(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// Returns the ranges of elements [begin, end), counted from `begin`.
std::vector<RatedRange> rates_between(const std::vector<RatedRange>& rated, int64_t begin, int64_t end) {
  std::vector<RatedRange> between;
  for (const RatedRange& range : rated) {
    const int64_t first = std::max(begin, range.begin), last = std::min(end, range.end);
    if (first < last) between.push_back({first - begin, last - begin, range.rates});
  }
  return between;
}

}  // namespace

double gradient_divisor(const OptimizerSettings& settings, double scale, double norm) {
  const double divisor = 1 / scale;
  return settings.clip > 0 && norm > settings.clip ? divisor * (norm / settings.clip) : divisor;
}

double largest_divisor(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
}

// What the fused step is called for: vectors, divided by their rates.
class AdamW::Blocks {
 public:
  // The arguments of the fused step in order: values, gradients and both moments.
  using Part = std::array<at::Tensor, 4>;

  // Adds vectors of equal length with these rates.
  void add(const Part& part, const std::vector<RatedRange>& rated) {
    const auto narrow = [&](int64_t begin, int64_t end) {
      Part narrowed;
      for (size_t list = 0; list < part.size(); ++list) narrowed[list] = part[list].narrow(0, begin, end - begin);
      return narrowed;
    };
    const int64_t count = part[0].numel();
    for (const RatedRange& range : rated) {
      const size_t group = group_of(range.rates);
      // A block belongs to the range that contains its first element; its elements in other ranges are strays.
      const int64_t first = filled_up(range.begin), last = std::min(filled_up(range.end), count);
      if (first < last) {
        const Part blocks = narrow(first, last);
        for (size_t list = 0; list < blocks.size(); ++list) groups_[group].lists[list].push_back(blocks[list]);
      }
      if (range.begin == first) continue;
      const int64_t block = first - kBlock;
      strays_.push_back({.group = group,
                         .block = narrow(block, std::min(first, count)),
                         .begin = range.begin - block,
                         .end = std::min(first, range.end) - block});
    }
  }

  void update(const OptimizerSettings& settings, double lr, const at::Tensor& count,
              const std::optional<at::Tensor>& divisor) const {
    // Strays are updated in a copy of their block, at the same positions as in the block itself.
    std::vector<Part> copies;
    for (const Strays& strays : strays_) {
      copies.emplace_back();
      for (size_t list = 0; list < strays.block.size(); ++list) copies.back()[list] = strays.block[list].clone();
    }
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
                        settings.beta1, settings.beta2, rates.weight_decay, settings.eps, /*amsgrad=*/false,
                        /*maximize=*/false, divisor, /*found_inf=*/std::nullopt);
    }
    // The moments do not depend on rates, so the block itself already has the right ones.
    for (size_t i = 0; i < strays_.size(); ++i) {
      const Strays& strays = strays_[i];
      const int64_t n = strays.end - strays.begin;
      at::Tensor(strays.block[0]).narrow(0, strays.begin, n).copy_(copies[i][0].narrow(0, strays.begin, n));
    }
  }

 private:
  using Lists = std::array<std::vector<at::Tensor>, 4>;
  struct Group {
    Rates rates;
    Lists lists;  // consecutive blocks of 16 elements each, the first element of which has these rates
  };
  // Elements in a block of another group that have the rates of group `group`. Example: if a range of rates begins at
  // element 20, the block [16, 32) belongs to the range before it, and elements 20 to 31 are strays.
  struct Strays {
    size_t group = 0;
    Part block;
    int64_t begin = 0, end = 0;  // in the block
  };

  size_t group_of(const Rates& rates) {
    const auto found = std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return g.rates == rates; });
    if (found != groups_.end()) return static_cast<size_t>(found - groups_.begin());
    groups_.push_back({.rates = rates, .lists = {}});
    return groups_.size() - 1;
  }

  std::vector<Group> groups_;
  std::vector<Strays> strays_;
};

AdamW::AdamW(std::vector<Updated> updated, const OptimizerSettings& settings, TieredTensors* tier)
    : updated_(std::move(updated)), settings_(settings), tier_(tier) {
  if (updated_.empty()) return;
  if (tier_ != nullptr) {
    for (const Updated& u : updated_) {
      const int64_t elements = u.gradients.numel();
      std::vector<size_t> vectors;
      if (u.in_tier) vectors.push_back(*u.in_tier);
      for (std::vector<PlacedVector>* moment : {&exp_avg_, &exp_avg_sq_}) {
        vectors.push_back(tier_->add(elements));
        moment->push_back({.tier = tier_, .vector = vectors.back(), .count = elements});
      }
      in_tier_.push_back(std::move(vectors));
    }
    return;
  }
  int64_t elements = 0;
  for (const Updated& u : updated_) elements += u.values.numel();
  // Each moment is one vector, divided like what is updated.
  const at::Tensor means = at::zeros({2, elements}, updated_[0].values.options());
  resident_ = std::make_unique<Blocks>();
  int64_t begin = 0;
  for (const Updated& u : updated_) {
    const int64_t count = u.values.numel();
    exp_avg_.push_back({.tensor = means[0].narrow(0, begin, count)});
    exp_avg_sq_.push_back({.tensor = means[1].narrow(0, begin, count)});
    resident_->add({u.values, u.gradients, exp_avg_.back().tensor, exp_avg_sq_.back().tensor}, u.rated);
    begin += count;
  }
}

AdamW::~AdamW() = default;

int64_t AdamW::held() const {
  StorageBytes moments;
  for (const std::vector<PlacedVector>* moment : {&exp_avg_, &exp_avg_sq_}) {
    for (const PlacedVector& vector : *moment) moments.add(vector.tensor);
  }
  return moments.bytes();
}

void AdamW::update(double scale, double norm, int64_t step) {
  ++updates_;
  if (updated_.empty()) return;
  const at::TensorOptions scalar = at::TensorOptions(at::kFloat).device(updated_[0].gradients.device());
  const at::Tensor count = at::full({}, static_cast<double>(updates_), scalar);
  // The fused step divides gradients by this number while it reads them, so scaling and clipping need no separate pass.
  // It reads the number as fp32, however, whose rounding is none of fp64's: such gradients are divided before.
  const double divide = gradient_divisor(settings_, scale, norm);
  std::optional<at::Tensor> divisor;
  if (divide != 1 && updated_[0].gradients.scalar_type() == at::kDouble) {
    for (const Updated& u : updated_) at::Tensor(u.gradients).div_(divide);
  } else if (divide != 1) {
    divisor = at::full({}, divide, scalar);
  }
  const double lr = learning_rate(settings_, step);
  if (resident_) return resident_->update(settings_, lr, count, divisor);
  tier_->update(in_tier_, [&](size_t of, int64_t begin, const std::vector<at::Tensor>& chunk) {
    const Updated& u = updated_[of];
    const int64_t n = chunk[0].numel();
    const at::Tensor values = u.in_tier ? chunk[0] : u.values.narrow(0, begin, n);
    Blocks blocks;
    blocks.add({values, u.gradients.narrow(0, begin, n), chunk[chunk.size() - 2], chunk.back()},
               rates_between(u.rated, begin, begin + n));
    blocks.update(settings_, lr, count, divisor);
    if (u.in_tier) u.leaves.narrow(0, begin, n).copy_(values);
  });
}

}  // namespace annulus
