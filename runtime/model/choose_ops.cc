// See choose_ops.h.
#include "runtime/model/choose_ops.h"

#include <algorithm>

namespace annulus {

const DecoderOps& ops_for(std::initializer_list<at::Tensor> tensors) {
  const at::ScalarType type = tensors.begin()->scalar_type();
  const auto all = [&](bool (*take)(const at::Tensor&)) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [&](const at::Tensor& t) { return !t.defined() || (t.scalar_type() == type && take(t)); });
  };
  return all(kernels_take) ? kernel_ops() : all(loops_take) ? loop_ops() : composed_ops();
}

const DecoderOps& ops_for_rotation(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine) {
  const DecoderOps &of_x = ops_for({x}), &of_table = ops_for({cosine, sine});
  return cosine.scalar_type() == at::kFloat && &of_x == &of_table ? of_x : composed_ops();
}

}  // namespace annulus
