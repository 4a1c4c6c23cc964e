// A model's parameters: their names and shapes, the units in which they are used, and the memory of which autograd's
// leaves are views. Used by model.cc, which declares and reads them, by runtime/training/state, which holds what is
// trained, divides it over ranks and fills the leaves, and by the memory plan, which needs sizes before there is any
// memory.
//
// A unit is what is used together: the embedding, a layer, the output. Its values are one flat vector and its gradients
// another: matrices first, then vectors (which have no weight decay). Each of these two groups is padded with zeros to
// a multiple of kAlign, and the unit to a multiple of kAlign times the number of parts, so that loops over the parts
// use the same vectors as loops over the whole. With a matrix [3, 5], a vector [3] and 2 parts, the matrix has elements
// 0 to 14, the vector has 16 to 18, and the unit has 32. The memory of values and of gradients may be released and
// taken again.
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
#include "runtime/model/model_shape.h"
#include "runtime/tensor_files/named_tensor.h"

namespace annulus {

struct ParameterInfo : ParameterShape {
  size_t unit = 0;
  int64_t offset = 0;  // in elements from the beginning of its unit
};

struct ParameterUnit {
  std::string name;            // "the embedding", "layer 3", "the output"
  size_t first = 0, last = 0;  // its parameters: [first, last) of the list
  int64_t decayed = 0;         // elements at the beginning that have weight decay, with padding
  int64_t elements = 0;        // with padding
};

class Parameters {
 public:
  static constexpr int64_t kAlign = 16;

  Parameters() = default;
  // Each group becomes a unit. Matrices have weight decay, vectors do not.
  explicit Parameters(const std::vector<DescribedUnit>& groups);
  // Pads each unit so that it can be cut into `parts` equal parts. Must be called once, before make_leaves.
  void lay_out(int parts);

  const std::vector<ParameterInfo>& list() const { return list_; }
  const std::vector<ParameterUnit>& units() const { return units_; }
  int64_t count() const;     // elements of all parameters
  int64_t elements() const;  // of all units, with padding

  // Makes the leaves' tensors, of this dtype. They hold no memory yet.
  void make_leaves(at::ScalarType dtype, at::Device device);
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const { return device_; }

  // A unit's values and gradients, [elements] and contiguous.
  ReleasableTensor& values(size_t unit) { return values_[unit]; }
  const ReleasableTensor& values(size_t unit) const { return values_[unit]; }
  ReleasableTensor& gradients(size_t unit) { return gradients_[unit]; }
  const ReleasableTensor& gradients(size_t unit) const { return gradients_[unit]; }

  // Writes the initial values of elements [begin, begin + into.numel()) of a unit to `into` [n], of any float dtype and
  // device. Each parameter has a random generator of its own (seed, name), so that its values depend neither on the
  // number of ranks nor on the order of names.
  void initialize(uint64_t seed, size_t unit, int64_t begin, at::Tensor into) const;
  // Takes all memory and sets initial values and zero gradients, for a model on one rank.
  void hold_all(uint64_t seed);

  // The autograd leaf of `parts` consecutive parameters from `name` on, which are vectors, or matrices of equal width,
  // stacked by rows; its .grad is a view of the unit's gradients. Call once per leaf.
  at::Tensor leaf(std::string_view name, int parts = 1) const;

  // Views of each parameter, named prefix + name, in flat vectors laid out like units: flat(u) is that of unit u.
  // value_views and gradient_views are views of the leaves' values and gradients.
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

// Values [first, first + n) of the sequence of standard normal numbers (fp32, CPU) that seed and name determine, from
// splitmix64 counters by Box-Muller in fp64.
at::Tensor named_normal(uint64_t seed, std::string_view name, int64_t n, int64_t first = 0);

}  // namespace annulus
