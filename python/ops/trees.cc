// The operators for prefix trees of rollouts (attention/pattern/rollouts.h), which annulus.Tree calls. They are not
// collective.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/pattern/rollouts.h"
#include "python/ops/call.h"

namespace annulus::torch_ops {
namespace {

at::Tensor numbers_of(const std::vector<int64_t>& numbers) { return at::tensor(numbers, at::TensorOptions(at::kLong)); }

std::vector<int64_t> vector_of(const at::Tensor& numbers, const std::string& name) {
  require(numbers.dim() == 1 && !numbers.is_floating_point() && !numbers.is_complex(),
          name + " must be whole numbers in one dimension");
  const at::Tensor here = numbers.to(at::kCPU, at::kLong).contiguous();
  const int64_t* const data = here.const_data_ptr<int64_t>();
  return {data, data + here.numel()};
}

at::Tensor positions(const at::Tensor& lengths, const at::Tensor& parents) {
  return numbers_of(tree_positions(vector_of(lengths, "lengths"), vector_of(parents, "parents")));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> targets(const at::Tensor& lengths, const at::Tensor& parents) {
  const TreeTargets t = tree_targets(vector_of(lengths, "lengths"), vector_of(parents, "parents"));
  return {numbers_of(t.source), numbers_of(t.target), numbers_of(t.weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> of_rollouts(const at::Tensor& tokens,
                                                                       const at::Tensor& lengths) {
  const std::vector<int64_t> all = vector_of(tokens, "tokens");
  std::vector<std::vector<int64_t>> rollouts;
  auto next = all.begin();
  for (const int64_t length : vector_of(lengths, "lengths")) {
    require(length >= 0 && length <= all.end() - next, "the lengths of the rollouts must add up to their tokens");
    rollouts.emplace_back(next, next + length);
    next += length;
  }
  require(next == all.end(), "the lengths of the rollouts must add up to their tokens");
  const RolloutTree tree = tree_of_rollouts(rollouts);
  return {numbers_of(tree.tokens), numbers_of(tree.lengths), numbers_of(tree.parents), numbers_of(tree.leaves)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(annulus, m) {
  m.def("tree_positions(Tensor lengths, Tensor parents) -> Tensor", positions);
  m.def("tree_targets(Tensor lengths, Tensor parents) -> (Tensor source, Tensor target, Tensor weight)", targets);
  // `tokens` has all rollouts one after the other.
  m.def(
      "tree_of_rollouts(Tensor tokens, Tensor lengths) -> (Tensor tokens, Tensor lengths, Tensor parents, Tensor "
      "leaves)",
      of_rollouts);
}

}  // namespace annulus::torch_ops
