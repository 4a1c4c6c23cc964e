// See composed_ops.h.
#include "model/composed_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <array>
#include <tuple>

namespace annulus::composed {
namespace {

at::Tensor widened(const at::Tensor& t) { return t.to(at::toOpMathType(t.scalar_type())); }

}  // namespace

RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  RmsNorm r{.sum = delta.defined() ? x + delta : x, .y = {}, .inv_rms = {}};
  if (r.sum.is_cuda()) {
    std::tie(r.y, r.inv_rms) = at::_fused_rms_norm(r.sum, r.sum.sizes().slice(1), weight, eps);
    return r;
  }
  // On other devices the operator is composed, too, and does not return the statistics.
  const at::Tensor wide = widened(r.sum);
  r.inv_rms = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps);
  r.y = (wide * r.inv_rms).mul_(weight).to(r.sum.scalar_type());
  return r;
}

RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                      const at::Tensor& weight, const at::Tensor& inv_rms) {
  RmsNormGradient g;
  if (sum.is_cuda()) {
    std::tie(g.dx, g.dweight) =
        at::_fused_rms_norm_backward(dy, sum, sum.sizes().slice(1), inv_rms, weight, std::array<bool, 2>{true, true});
  } else {
    const at::Tensor normed = widened(sum).mul(inv_rms);
    const at::Tensor wide = widened(dy);
    g.dweight = (wide * normed).sum(0).to(weight.scalar_type());
    const at::Tensor dnormed = wide * weight;
    g.dx = (dnormed - normed * (dnormed * normed).mean(-1, /*keepdim=*/true)).mul_(inv_rms).to(sum.scalar_type());
  }
  if (dsum.defined()) g.dx.add_(dsum);
  return g;
}

std::vector<Charge> norm_charges(int64_t rows, int64_t dim, int64_t wide) {
  const int64_t one = rows * dim * wide;
  return {{"widened, and squared or normed", 2 * one, When::kForward},
          // normed, wide, dnormed, their product, the term that is subtracted, the difference
          {"temporaries of the gradient", 6 * one, When::kBackward}};
}

void rotate_into(const at::Tensor& out, const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine,
                 bool backward) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor c = cosine.unsqueeze(1);
  const at::Tensor s = sine.unsqueeze(1);
  const at::Tensor a = x.narrow(-1, 0, half);
  const at::Tensor b = x.narrow(-1, half, half);
  const double sign = backward ? -1 : 1;
  out.narrow(-1, 0, half).copy_(at::mul(a, c).addcmul_(b, s, -sign));
  out.narrow(-1, half, half).copy_(at::mul(b, c).addcmul_(a, s, sign));
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  const int64_t ffn = gate_up.size(1) / 2;
  return at::silu(gate_up.narrow(1, 0, ffn)).mul_(gate_up.narrow(1, ffn, ffn));
}

at::Tensor swiglu_backward(const at::Tensor& dout, const at::Tensor& gate_up) {
  const int64_t ffn = gate_up.size(1) / 2;
  const at::Tensor gate = gate_up.narrow(1, 0, ffn);
  at::Tensor result = at::empty_like(gate_up);
  at::Tensor dgate = result.narrow(1, 0, ffn);
  at::Tensor dup = result.narrow(1, ffn, ffn);
  at::mul_out(dup, dout, at::silu(gate));
  at::silu_backward_out(dgate, dout * gate_up.narrow(1, ffn, ffn), gate);
  return result;
}

CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, double scale, bool with_gradient) {
  const at::Tensor index = targets.unsqueeze(1), left_out = index.lt(0);
  at::Tensor log_p = at::_log_softmax(logits, 1, /*half_to_float=*/false);
  logits.reset();
  CrossEntropy r{.loss = log_p.gather(1, index.clamp_min(0)).masked_fill_(left_out, 0).sum().neg(), .dlogits = {}};
  if (with_gradient) {
    // Not scatter_: with deterministic algorithms it becomes index_put_ on a GPU, which reads its indices on the host.
    const at::Tensor columns = at::arange(log_p.size(1), targets.options());
    r.dlogits = log_p.exp_().add_(columns.eq(index), -1).mul_(scale).masked_fill_(left_out, 0);
  }
  return r;
}

}  // namespace annulus::composed
