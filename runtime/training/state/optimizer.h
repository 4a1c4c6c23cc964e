// AdamW, and clipping by the global norm. Used by training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "runtime/training/state/learning_rate.h"

namespace annulus {

// Returns what the gradients are divided by before an update, so that they are multiplied by `scale` and then, if their
// norm `norm` after that exceeds the clip, reduced to it. Infinite if fp64 cannot hold it.
double gradient_divisor(const OptimizerSettings& settings, double scale, double norm);
// The largest such number that can be applied to gradients of this dtype, kFloat or kDouble.
double largest_divisor(at::ScalarType dtype);

// How an element is updated.
struct Rates {
  double lr = 1;  // a factor for the learning rate of the schedule
  double weight_decay = 0;

  friend bool operator==(const Rates&, const Rates&) = default;
};
// The rates of elements [begin, end).
struct RatedRange {
  int64_t begin = 0, end = 0;
  Rates rates;

  friend bool operator==(const RatedRange&, const RatedRange&) = default;
};

// The values and gradients of a unit (runtime/model/parameters.h), or of a rank's part of one.
struct Updated {
  at::Tensor values, gradients;   // 1-D, of equal length, fp32 or fp64
  std::vector<RatedRange> rated;  // consecutive ranges that cover all elements
};

// AdamW (arXiv 1711.05101) by LibTorch's fused step, called once for all elements with the same rates. The update of an
// element depends only on that element and its rates, down to the last bit if the lengths of all vectors are multiples
// of 16 elements. Ranges of rates may begin anywhere. Not thread-safe.
class AdamW {
 public:
  // The tensors of `updated` must keep their memory for the lifetime of this object.
  AdamW(std::vector<Updated> updated, const OptimizerSettings& settings);

  // Updates the values from the gradients times `scale`, whose norm is `norm`; if it exceeds the clip, they are scaled
  // down to it. The gradients may be overwritten. gradient_divisor() of `scale` and `norm` must be at most
  // largest_divisor() of the values' dtype. `step` selects the learning rate.
  void update(double scale, double norm, int64_t step);

  // What a checkpoint keeps: vectors of the same lengths as the values, and the number of updates (bias correction).
  const std::vector<at::Tensor>& exp_avg() const { return exp_avg_; }
  const std::vector<at::Tensor>& exp_avg_sq() const { return exp_avg_sq_; }
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  // The arguments of the fused step in order: values, gradients and both moments.
  using Lists = std::array<std::vector<at::Tensor>, 4>;
  struct Group {
    Rates rates;
    Lists lists;  // consecutive blocks of 16 elements each, the first element of which has these rates
  };
  // Elements in a block of another group that have the rates of group `group`. Example: if a range of rates begins at
  // element 20, the block [16, 32) belongs to the range before it, and elements 20 to 31 are strays.
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
