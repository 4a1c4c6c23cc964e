// See rotary.h.
#include "modules/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>

#include <cmath>

namespace annulus {

RotaryTable make_rotary_table(const at::Tensor& positions, int64_t head_dim, double theta, at::ScalarType dtype,
                              at::Device device) {
  const at::Tensor frequency =
      (at::arange(0, head_dim, 2, at::TensorOptions(at::kDouble)) * (-std::log(theta) / static_cast<double>(head_dim)))
          .exp();
  const at::Tensor angle = at::outer(positions.to(at::kCPU, at::kDouble), frequency);
  return {angle.cos().to(device, dtype).contiguous(), angle.sin().to(device, dtype).contiguous()};
}

at::Tensor rotate(const at::Tensor& x, const RotaryTable& table) {
  const at::Tensor cosine = table.cosine.unsqueeze(1);
  const at::Tensor sine = table.sine.unsqueeze(1);
  const int64_t half = x.size(-1) / 2;
  const at::Tensor a = x.narrow(-1, 0, half);
  const at::Tensor b = x.narrow(-1, half, half);
  return at::cat({a * cosine - b * sine, b * cosine + a * sine}, -1);
}

}  // namespace annulus
