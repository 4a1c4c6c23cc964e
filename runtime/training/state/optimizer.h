// AdamW, and clipping by the global norm. Used by training.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memory/tiers/tiered_tensors.h"
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
  at::Tensor values = {}, gradients = {};  // 1-D, of equal length, fp32 or fp64
  std::vector<RatedRange> rated;           // consecutive ranges that cover all elements
  // If the values lie in a tier, `values` is undefined: their number there, and the tensor of another dtype that has
  // them rounded.
  std::optional<size_t> in_tier = {};
  at::Tensor leaves = {};
};

// AdamW (arXiv 1711.05101) by LibTorch's fused step, called once for all elements with the same rates. The update of an
// element depends only on that element and its rates, down to the last bit if the lengths of all vectors are multiples
// of 16 elements. Ranges of rates may begin anywhere. With a tier, in which the moments and perhaps values lie, it is
// called for one chunk after another, with the same bits. Not thread-safe.
class AdamW {
 public:
  // The tensors of `updated` must keep their memory for the lifetime of this object, and the tier, which may be null,
  // must outlive it.
  AdamW(std::vector<Updated> updated, const OptimizerSettings& settings, TieredTensors* tier = nullptr);
  ~AdamW();

  // Updates the values from the gradients times `scale`, whose norm is `norm`; if it exceeds the clip, they are scaled
  // down to it. The gradients may be overwritten. gradient_divisor() of `scale` and `norm` must be at most
  // largest_divisor() of the values' dtype. `step` selects the learning rate.
  void update(double scale, double norm, int64_t step);

  // What a checkpoint keeps: vectors of the same lengths as the values, and the number of updates (bias correction).
  const std::vector<PlacedVector>& exp_avg() const { return exp_avg_; }
  const std::vector<PlacedVector>& exp_avg_sq() const { return exp_avg_sq_; }
  int64_t updates() const { return updates_; }
  int64_t held() const;  // the bytes of the moments, but for those in a tier
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  class Blocks;

  std::vector<Updated> updated_;
  OptimizerSettings settings_;
  TieredTensors* const tier_;
  std::vector<PlacedVector> exp_avg_, exp_avg_sq_;
  std::unique_ptr<Blocks> resident_;          // of all vectors, without a tier
  std::vector<std::vector<size_t>> in_tier_;  // of each of updated_: its vectors there, moments last
  int64_t updates_ = 0;
};

}  // namespace annulus
