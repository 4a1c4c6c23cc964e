// A model's parameters: their names and shapes, the units in which they are used, and the memory that autograd's leaves
// view. Used by model.cc (declares and reads), training/state (which holds what is trained, cuts it over ranks and
// fills the leaves) and the memory plan (which asks for sizes before there is any memory).
//
// A unit is what is used together: the embedding, each layer, the output. Its values are one flat vector, its gradients
// another: matrices first, then vectors (which have no weight decay), each of the two filled up with zeros to a
// multiple of kAlign, so that a unit can be cut into as many parts as there are ranks to hold them and vector loops
// over the parts begin where those over the whole would. The memory of either may be let go and taken again.
//
// Names and shapes are those of Hugging Face's Llama layout. Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/releasable.h"
#include "model/description/model_shape.h"
#include "tensor_files/named_tensor.h"

namespace annulus {

struct ParameterInfo : ParameterShape {
  size_t unit = 0;
  int64_t offset = 0;  // elements from the beginning of its unit
};

struct ParameterUnit {
  std::string name;            // "the embedding", "layer 3", "the output"
  size_t first = 0, last = 0;  // its parameters: [first, last) of the list
  int64_t decayed = 0;         // elements at the beginning that have weight decay, filled up
  int64_t elements = 0;        // filled up
};

class Parameters {
 public:
  static constexpr int64_t kAlign = 16;

  Parameters() = default;
  // A group is a unit. Matrices have weight decay, vectors do not.
  explicit Parameters(const std::vector<DescribedUnit>& groups);
  // Fills each unit up so that it can be cut into `parts` equal ones. To be called once.
  void lay_out(int parts);

  const std::vector<ParameterInfo>& list() const { return list_; }
  const std::vector<ParameterUnit>& units() const { return units_; }
  int64_t count() const;     // elements of all parameters
  int64_t elements() const;  // of all units, filled up

  // Makes the leaves' tensors, of this dtype. None is held yet.
  void make_leaves(at::ScalarType dtype, at::Device device);
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

  // [elements] of a unit, contiguous.
  ReleasableTensor& values(size_t unit) { return values_[unit]; }
  const ReleasableTensor& values(size_t unit) const { return values_[unit]; }
  ReleasableTensor& gradients(size_t unit) { return gradients_[unit]; }
  const ReleasableTensor& gradients(size_t unit) const { return gradients_[unit]; }

  // The initial values of elements [begin, begin + into.numel()) of a unit, written to `into` [n], of any float dtype
  // and device: each parameter's from a generator of its own (seed, name), so that they depend on neither the number of
  // ranks nor the order of names.
  void initialize(uint64_t seed, size_t unit, int64_t begin, at::Tensor into) const;
  // Holds everything, with initial values, and gradients of zero: for a model on one rank.
  void hold_all(uint64_t seed);

  // The autograd leaf of `parts` parameters that lie one after the other from `name` on, vectors, or matrices of equal
  // width, stacked by rows; its .grad is a view of the unit's gradients. Call once per leaf.
  at::Tensor leaf(std::string_view name, int parts = 1) const;

  // Views of each parameter, named prefix + name, in vectors laid out as units are: flat(u) is that of unit u. Those of
  // the leaves' values, and of their gradients.
  using OfUnit = std::function<at::Tensor(size_t unit)>;
  std::vector<NamedTensor> views(const OfUnit& flat, const std::string& prefix = "") const;
  std::vector<NamedTensor> value_views() const;
  std::vector<NamedTensor> gradient_views() const;

 private:
  std::vector<ParameterInfo> list_;
  std::vector<ParameterUnit> units_;
  std::vector<ReleasableTensor> values_, gradients_;  // of each unit
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
};

// Values [first, first + n) of those of the standard normal distribution (fp32, CPU) that belong to seed and name, from
// splitmix64 counters and Box-Muller in fp64.
at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n, int64_t first = 0);

}  // namespace annulus
