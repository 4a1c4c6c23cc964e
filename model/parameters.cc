// See parameters.h.
#include "model/parameters.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "common/error.h"
#include "common/splitmix64.h"

namespace annulus {
namespace {

// (0, 1)
double uniform(uint64_t x) { return (static_cast<double>(x >> 11) + 0.5) * 0x1.0p-53; }

}  // namespace

at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n) {
  uint64_t key = splitmix64(seed);
  for (const char c : name) key = splitmix64(key + static_cast<unsigned char>(c));
  at::Tensor out = at::empty({n}, at::TensorOptions(at::kFloat));
  float* p = out.data_ptr<float>();
  at::parallel_for(0, n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double u = uniform(splitmix64(key + 2 * static_cast<uint64_t>(i) * kSplitmix64Step));
      const double v = uniform(splitmix64(key + (2 * static_cast<uint64_t>(i) + 1) * kSplitmix64Step));
      p[i] = static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v));
    }
  });
  return out;
}

void Parameters::add(std::string name, std::vector<int64_t> shape, double std) {
  if (shape.size() == 2 && decayed_ != count_) {
    throw Error(ErrorKind::kInternal, "model", "matrix " + name + " is declared after a vector");
  }
  const int64_t numel = c10::multiply_integers(shape);
  list_.push_back({std::move(name), std::move(shape), count_, std});
  count_ += numel;
  if (list_.back().shape.size() == 2) decayed_ = count_;
}

void Parameters::allocate(uint64_t seed, at::ScalarType dtype, at::Device device) {
  const at::TensorOptions options = at::TensorOptions(at::toOpMathType(dtype)).device(device);
  values_ = at::empty({count_}, options);
  const at::Tensor sums = at::zeros({count_ + kReadout}, options);
  reduced_ = sums.narrow(0, 0, count_ + kExtras);
  readout_ = sums.narrow(0, count_, kReadout);
  gradients_ = sums.narrow(0, 0, count_);
  const bool copies = values_.scalar_type() != dtype;
  leaf_values_ = copies ? at::empty({count_}, options.dtype(dtype)) : values_;
  leaf_gradients_ = copies ? at::zeros({count_}, options.dtype(dtype)) : gradients_;
  for (const ParameterInfo& p : list_) {
    const int64_t n = c10::multiply_integers(p.shape);
    at::Tensor target = values_.narrow(0, p.offset, n);
    if (p.shape.size() == 1) {
      target.fill_(1);
    } else {
      target.copy_(named_normal(seed, p.name, n).mul_(p.std));
    }
  }
  refresh_leaves();
}

std::vector<Charge> parameter_charges(int64_t count, at::ScalarType dtype) {
  const auto e = static_cast<int64_t>(c10::elementSize(dtype));
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  return {{"weights", count * wide, When::kLasts},
          {"gradients", (count + Parameters::kReadout) * wide, When::kLasts},
          {"leaves", e == wide ? 0 : 2 * count * e, When::kLasts}};
}

void Parameters::refresh_leaves() {
  if (!leaf_values_.is_same(values_)) leaf_values_.copy_(values_);
}

void Parameters::begin_backward(bool first) {
  // Leaves in bf16 are added up in fp32, backward by backward.
  if (first || !leaf_gradients_.is_same(gradients_)) leaf_gradients_.zero_();
}

void Parameters::gather_gradients(bool first) {
  if (leaf_gradients_.is_same(gradients_)) return;
  if (first) {
    gradients_.copy_(leaf_gradients_);
  } else {
    gradients_.add_(leaf_gradients_);
  }
}

at::Tensor Parameters::leaf(std::string_view name, int parts) const {
  size_t first = 0;
  while (first < list_.size() && list_[first].name != name) ++first;
  if (first + parts > list_.size()) {
    throw Error(ErrorKind::kInternal, "model", "no parameter " + std::string(name));
  }
  std::vector<int64_t> shape = list_[first].shape;
  for (int i = 1; i < parts; ++i) shape[0] += list_[first + i].shape[0];
  const int64_t n = c10::multiply_integers(shape);
  at::Tensor leaf = leaf_values_.narrow(0, list_[first].offset, n).view(shape).detach();
  leaf.set_requires_grad(true);
  leaf.mutable_grad() = leaf_gradients_.narrow(0, list_[first].offset, n).view(shape);
  return leaf;
}

std::vector<NamedTensor> Parameters::views(const at::Tensor& flat, const std::string& prefix) const {
  std::vector<NamedTensor> out;
  out.reserve(list_.size());
  for (const ParameterInfo& p : list_) {
    out.push_back({prefix + p.name, flat.narrow(0, p.offset, c10::multiply_integers(p.shape)).view(p.shape)});
  }
  return out;
}

}  // namespace annulus
