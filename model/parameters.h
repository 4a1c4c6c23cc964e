// A model's parameters as flat vectors: values and gradients side by side in one order, so that one collective reduces
// all gradients, one call updates all weights, and a reduce-scatter can shard them later. Used by model.cc (declares
// and reads), optimizer.cc (updates), training.cc (reduces) and checkpoints (save).
//
// A model that computes in bf16 has fp32 values all the same: they are what is updated, saved and compared. The
// autograd leaves view a bf16 copy of them, and their gradients are bf16 until they are reduced. In fp32 and fp64 the
// leaves view the values and gradients themselves and nothing is copied.
//
// Names and shapes are those of Hugging Face's Llama layout. Matrices come first, then vectors: weight decay is for the
// first `decayed` elements. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memory/charge.h"
#include "tensor_files/named_tensor.h"

namespace annulus {

struct ParameterInfo {
  std::string name;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // elements from the beginning of a flat vector
  double std = 0;      // of the initial normal distribution; vectors begin as ones
};

class Parameters {
 public:
  // Scalars that travel with the gradients in one collective: the loss, a request to stop, and the number of targets
  // that count, in two parts of 24 bits: fp32 adds them up exactly.
  static constexpr int64_t kExtras = 4;
  // Those, and the norm of the reduced gradients.
  static constexpr int64_t kReadout = 5;

  // Declares a parameter of one dimension (no weight decay) or two. All matrices must come before the first vector.
  void add(std::string name, std::vector<int64_t> shape, double std = 0);

  // Takes the memory and fills the values, each from a generator of its own (seed, name): the weights depend on
  // neither the number of ranks nor the order of names. `dtype`: of the leaves.
  void allocate(uint64_t seed, at::ScalarType dtype, at::Device device);

  const std::vector<ParameterInfo>& list() const { return list_; }
  int64_t count() const { return count_; }
  int64_t decayed() const { return decayed_; }

  // [count], contiguous; fp32, or fp64 where the leaves are.
  const at::Tensor& values() const { return values_; }
  const at::Tensor& gradients() const { return gradients_; }
  // [count + kExtras]: gradients, then the extras.
  at::Tensor& reduced() { return reduced_; }
  // [kReadout]: what a step tells the host, side by side so that one copy brings it there.
  const at::Tensor& readout() const { return readout_; }

  // What the leaves view: the values and gradients themselves, or copies in the leaves' dtype.
  const at::Tensor& leaf_values() const { return leaf_values_; }
  const at::Tensor& leaf_gradients() const { return leaf_gradients_; }
  // Whoever has changed values() brings the change to the leaves.
  void refresh_leaves();
  // A step of one or more backwards: before each, which adds to the leaves' gradients, and after it, into gradients().
  // `first`: of the step.
  void begin_backward(bool first);
  void gather_gradients(bool first);

  // The autograd leaf of `parts` parameters that lie one after the other from `name` on, matrices of equal width
  // stacked by rows; its .grad is a view of leaf_gradients(). Call once per leaf.
  at::Tensor leaf(std::string_view name, int parts = 1) const;

  // Views of a flat vector of this layout, named prefix + name.
  std::vector<NamedTensor> views(const at::Tensor& flat, const std::string& prefix = "") const;

 private:
  std::vector<ParameterInfo> list_;
  int64_t count_ = 0;
  int64_t decayed_ = 0;
  at::Tensor values_;
  at::Tensor reduced_;
  at::Tensor gradients_;
  at::Tensor readout_;
  at::Tensor leaf_values_;
  at::Tensor leaf_gradients_;
};

// What Parameters::allocate takes for `count` elements: "weights", "gradients", and "leaves" where they are copies.
std::vector<Charge> parameter_charges(int64_t count, at::ScalarType dtype);

// n values of the standard normal distribution (fp32, CPU) from splitmix64 counters and Box-Muller in fp64; the same
// seed and name give the same values everywhere.
at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n);

}  // namespace annulus
