// A model's parameters: names and shapes, the units in which they are used, and the flat memory that autograd's leaves
// view. Used by model.cc, which declares and reads them, by runtime/training/state, which holds the trained weights,
// shards them over ranks and fills the leaves, and by the memory plan, which needs their sizes before allocation.
//
// A unit is used as a whole: the embedding, a half of a layer, the output. Its values are one flat vector and its
// gradients another: matrices first, then vectors (without weight decay). Each of these two groups is padded with zeros
// to a multiple of kAlign, and the unit to a multiple of kAlign times the number of parts, so that vectorized loops
// over the parts use the same vectors as loops over the whole. With a matrix [3, 5], a vector [3] and 2 parts, the
// matrix has elements 0 to 14, the vector 16 to 18, and the unit 32 elements. The memory of values and of gradients may
// be released and allocated again.
//
// Names and shapes are those of Hugging Face's Llama layout. Not thread safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memory/releasable.h"
#include "runtime/model/model_shape.h"
#include "runtime/tensor_files/named_tensor.h"

namespace annulus {

struct ParameterInfo : ParameterShape {
  size_t unit = 0;
  int64_t offset = 0;  // in its unit, in elements
};

struct ParameterUnit {
  std::string name;            // as DescribedUnit::name
  size_t first = 0, last = 0;  // parameters [first, last) of list()
  int64_t decayed = 0;         // leading elements with weight decay, padding included
  int64_t elements = 0;        // with padding
};

class Parameters {
 public:
  static constexpr int64_t kAlign = 16;

  Parameters() = default;
  // Makes each group a unit. Matrices have weight decay, vectors do not.
  explicit Parameters(const std::vector<DescribedUnit>& groups);
  // Pads each unit to `parts` equal parts. Call it once, before make_leaves.
  void lay_out(int parts);

  const std::vector<ParameterInfo>& list() const { return list_; }
  const std::vector<ParameterUnit>& units() const { return units_; }
  int64_t count() const;     // of elements of all parameters
  int64_t elements() const;  // of all units, with padding

  // Makes the leaves' tensors, of this dtype, without memory.
  void make_leaves(at::ScalarType dtype, at::Device device);
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

  // Return a unit's values and gradients, contiguous [elements].
  ReleasableTensor& values(size_t unit) { return values_[unit]; }
  const ReleasableTensor& values(size_t unit) const { return values_[unit]; }
  ReleasableTensor& gradients(size_t unit) { return gradients_[unit]; }
  const ReleasableTensor& gradients(size_t unit) const { return gradients_[unit]; }

  // Writes the initial values of elements [begin, begin + into.numel()) of a unit to `into` [n], of any float dtype and
  // device. Each parameter has its own random generator (seed, name), so its values depend neither on the number of
  // ranks nor on other parameters.
  void initialize(uint64_t seed, size_t unit, int64_t begin, at::Tensor into) const;
  // Allocates all memory and sets initial values and zero gradients, for a model on one rank.
  void hold_all(uint64_t seed);

  // Returns the autograd leaf of `parts` consecutive parameters from `name` on (vectors, or matrices of equal width,
  // stacked by rows); its .grad is a view of the unit's gradients. Call once per leaf.
  at::Tensor leaf(std::string_view name, int parts = 1) const;

  // Returns a view of each parameter, named prefix + name, into flat(u), a vector with the layout of its unit u.
  // value_views and gradient_views use the leaves' values and gradients.
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

// Returns numbers [first, first + n) of the standard normal sequence (fp32, CPU) of this seed and name: splitmix64 of a
// counter, and Box-Muller in fp64.
at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n, int64_t first = 0);

}  // namespace annulus
