// See parameters.h.
#include "runtime/model/parameters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "common/error.h"
#include "common/splitmix64.h"
#include "memory/pool/pool_tensor.h"

namespace annulus {
namespace {

// The number of elements drawn at once.
constexpr int64_t kDrawn = int64_t{1} << 22;

// A number in (0, 1).
double uniform(uint64_t x) { return (static_cast<double>(x >> 11) + 0.5) * 0x1.0p-53; }

int64_t filled_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n, int64_t first) {
  uint64_t key = splitmix64(seed);
  for (const char c : name) key = splitmix64(key + static_cast<unsigned char>(c));
  at::Tensor out = at::empty({n}, at::TensorOptions(at::kFloat));
  float* p = out.data_ptr<float>();
  at::parallel_for(0, n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<uint64_t>(first + i);
      const double u = uniform(splitmix64(key + 2 * at * kSplitmix64Step));
      const double v = uniform(splitmix64(key + (2 * at + 1) * kSplitmix64Step));
      p[i] = static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
    }
  });
  return out;
}

Parameters::Parameters(const std::vector<DescribedUnit>& groups) {
  for (const DescribedUnit& group : groups) {
    const size_t first = list_.size();
    for (const ParameterShape& p : group.parameters) {
      if (p.shape.size() == 2 && list_.size() > first && list_.back().shape.size() == 1) {
        throw Error(ErrorKind::kInternal, "model", "matrix " + p.name + " is described after a vector");
      }
      list_.push_back({p, units_.size()});
    }
    units_.push_back({.name = group.name, .first = first, .last = list_.size()});
  }
}

void Parameters::lay_out(int parts) {
  for (ParameterUnit& unit : units_) {
    int64_t end = 0;
    for (size_t i = unit.first; i < unit.last; ++i) {
      ParameterInfo& p = list_[i];
      if (p.shape.size() == 1 && (i == unit.first || list_[i - 1].shape.size() == 2)) end = filled_up(end, kAlign);
      p.offset = end;
      end += p.count();
      if (p.shape.size() == 2) unit.decayed = filled_up(end, kAlign);
    }
    unit.elements = filled_up(end, kAlign * parts);
  }
}

int64_t Parameters::count() const {
  int64_t count = 0;
  for (const ParameterInfo& p : list_) count += p.count();
  return count;
}

int64_t Parameters::elements() const {
  int64_t elements = 0;
  for (const ParameterUnit& unit : units_) elements += unit.elements;
  return elements;
}

void Parameters::make_leaves(at::ScalarType dtype, at::Device device) {
  dtype_ = dtype;
  device_ = device;
  const at::TensorOptions options = at::TensorOptions(dtype).device(device);
  for (const ParameterUnit& unit : units_) {
    values_.emplace_back(unit.elements, options);
    gradients_.emplace_back(unit.elements, options, pool_allocator(PoolPurpose::kGradients, device));
  }
}

void Parameters::initialize(uint64_t seed, size_t unit, int64_t begin, at::Tensor into) const {
  into.zero_();  // also the padding
  const int64_t end = begin + into.numel();
  for (size_t i = units_[unit].first; i < units_[unit].last; ++i) {
    const ParameterInfo& p = list_[i];
    const int64_t last = std::min(end, p.offset + p.count());
    for (int64_t from = std::max(begin, p.offset); from < last; from += kDrawn) {
      const int64_t n = std::min(kDrawn, last - from);
      at::Tensor target = into.narrow(0, from - begin, n);
      if (p.std == 0) {
        target.fill_(p.value);
      } else {
        target.copy_(named_normal(seed, p.name, n, from - p.offset).mul_(p.std));
      }
    }
  }
}

void Parameters::hold_all(uint64_t seed) {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    values_[unit].take();
    initialize(seed, unit, 0, values_[unit].tensor());
    gradients_[unit].take();
    at::Tensor(gradients_[unit].tensor()).zero_();
  }
}

at::Tensor Parameters::leaf(std::string_view name, int parts) const {
  size_t first = 0;
  while (first < list_.size() && list_[first].name != name) ++first;
  if (first + static_cast<size_t>(parts) > list_.size()) {
    throw Error(ErrorKind::kInternal, "model", "no parameter " + std::string(name));
  }
  const ParameterInfo& p = list_[first];
  std::vector<int64_t> shape = p.shape;
  for (int i = 1; i < parts; ++i) shape[0] += list_[first + static_cast<size_t>(i)].shape[0];
  at::Tensor leaf = values_[p.unit].alias(p.offset, shape);
  leaf.set_requires_grad(true);
  leaf.mutable_grad() = gradients_[p.unit].alias(p.offset, shape);
  return leaf;
}

std::vector<NamedTensor> Parameters::views(const OfUnit& flat, const std::string& prefix) const {
  std::vector<NamedTensor> out;
  out.reserve(list_.size());
  for (const ParameterInfo& p : list_) {
    out.push_back({prefix + p.name, flat(p.unit).narrow(0, p.offset, p.count()).view(p.shape)});
  }
  return out;
}

std::vector<NamedTensor> Parameters::value_views() const {
  return views([this](size_t unit) { return values_[unit].tensor(); });
}

std::vector<NamedTensor> Parameters::gradient_views() const {
  return views([this](size_t unit) { return gradients_[unit].tensor(); });
}

}  // namespace annulus
