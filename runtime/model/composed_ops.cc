// See choose_ops.h.
#include "runtime/model/choose_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <array>

namespace annulus {
namespace {

at::Tensor widened(const at::Tensor& t) { return t.to(at::toOpMathType(t.scalar_type())); }

// What a norm multiplies by: the weight itself, or the sum in the wider dtype.
at::Tensor factor_of(const NormWeight& w) { return w.offset == 0 ? w.weight : widened(w.weight).add(w.offset); }

// Writes x [batch, n, heads, head_dim], rotated by the table's angles [n, head_dim / 2], to out; `backward` rotates the
// other way. Pairs are (i, i + head_dim / 2). Both tensors may be strided.
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

struct NormedHeads {
  int64_t from, count;  // in heads
  const NormWeight& weight;
};
std::array<NormedHeads, 2> normed_heads(const NormWeight& q, const NormWeight& k, int64_t heads, int64_t kv_heads) {
  return {{{0, heads, q}, {heads, kv_heads, k}}};
}
// Some heads of each row as rows of their own: [rows * count, head_dim].
at::Tensor flat(const at::Tensor& t, int64_t from, int64_t count, int64_t head_dim) {
  return t.narrow(1, from * head_dim, count * head_dim).reshape({-1, head_dim});
}

at::Tensor activated(const at::Tensor& gate, Activation activation) {
  return activation == Activation::kSilu ? at::silu(gate) : at::gelu(gate, "tanh");
}

class ComposedOps : public DecoderOps {
 public:
  RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight,
                       double eps) const override {
    RmsNorm r{.sum = delta.defined() ? x + delta : x, .y = {}, .inv_rms = {}};
    // LibTorch's own operator is composed, too, and does not return the statistics.
    const at::Tensor wide = widened(r.sum);
    r.inv_rms = at::rsqrt(wide.square().mean(-1, /*keepdim=*/true) + eps);
    r.y = (wide * r.inv_rms).mul_(factor_of(weight)).to(r.sum.scalar_type());
    return r;
  }

  RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                        const NormWeight& weight, const at::Tensor& inv_rms) const override {
    RmsNormGradient g;
    const at::Tensor normed = widened(sum).mul(inv_rms);
    const at::Tensor wide = widened(dy);
    g.dweight = (wide * normed).sum(0);
    const at::Tensor dnormed = wide * factor_of(weight);
    g.dx = (dnormed - normed * (dnormed * normed).mean(-1, /*keepdim=*/true)).mul_(inv_rms).to(sum.scalar_type());
    if (dsum.defined()) g.dx.add_(dsum);
    return g;
  }

  HeadNormed head_norm(const at::Tensor& qkv, const NormWeight& q_weight, const NormWeight& k_weight, int64_t heads,
                       int64_t kv_heads, double eps) const override {
    const int64_t rows = qkv.size(0), d = q_weight.weight.size(0), width = qkv.size(1);
    const HeadNormed all{at::empty_like(qkv),
                         at::empty({rows, heads + kv_heads}, qkv.options().dtype(at::toOpMathType(qkv.scalar_type())))};
    for (const auto& [from, count, weight] : normed_heads(q_weight, k_weight, heads, kv_heads)) {
      const RmsNorm r = add_rms_norm(flat(qkv, from, count, d), {}, weight, eps);
      all.y.narrow(1, from * d, count * d).copy_(r.y.view({rows, count * d}));
      all.inv_rms.narrow(1, from, count).copy_(r.inv_rms.view({rows, count}));
    }
    const int64_t v = (heads + kv_heads) * d;
    all.y.narrow(1, v, width - v).copy_(qkv.narrow(1, v, width - v));
    return all;
  }

  HeadNormGradient head_norm_backward(const at::Tensor& dy, const at::Tensor& qkv, const NormWeight& q_weight,
                                      const NormWeight& k_weight, const at::Tensor& inv_rms,
                                      int64_t heads) const override {
    const int64_t rows = qkv.size(0), d = q_weight.weight.size(0), width = qkv.size(1),
                  kv_heads = inv_rms.size(1) - heads;
    HeadNormGradient all{.dqkv = at::empty_like(qkv), .dq_weight = {}, .dk_weight = {}};
    for (const auto& [from, count, weight] : normed_heads(q_weight, k_weight, heads, kv_heads)) {
      const RmsNormGradient g = add_rms_norm_backward(flat(dy, from, count, d), {}, flat(qkv, from, count, d), weight,
                                                      inv_rms.narrow(1, from, count).reshape({rows * count, 1}));
      all.dqkv.narrow(1, from * d, count * d).copy_(g.dx.view({rows, count * d}));
      (from == 0 ? all.dq_weight : all.dk_weight) = g.dweight;
    }
    const int64_t v = (heads + kv_heads) * d;
    all.dqkv.narrow(1, v, width - v).copy_(dy.narrow(1, v, width - v));
    return all;
  }

  Heads rotary_split(const at::Tensor& qkv, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                     int64_t kv_heads) const override {
    const int64_t n = cosine.size(0), d = cosine.size(1) * 2, batch = qkv.size(0) / n;
    Heads to{at::empty({batch, n, heads, d}, qkv.options()), at::empty({batch, n, kv_heads, d}, qkv.options()),
             at::empty({batch, n, kv_heads, d}, qkv.options())};
    const at::Tensor all = qkv.view({batch, n, heads + 2 * kv_heads, d});
    rotate_into(to.q, all.narrow(2, 0, heads), cosine, sine, /*backward=*/false);
    rotate_into(to.k, all.narrow(2, heads, kv_heads), cosine, sine, /*backward=*/false);
    to.v.copy_(all.narrow(2, heads + kv_heads, kv_heads));
    return to;
  }

  at::Tensor rotary_split_backward(const Heads& gradients, const at::Tensor& cosine,
                                   const at::Tensor& sine) const override {
    const int64_t batch = gradients.q.size(0), n = cosine.size(0), d = cosine.size(1) * 2;
    const int64_t heads = gradients.q.size(2), kv_heads = gradients.k.size(2);
    at::Tensor dqkv = at::empty({batch * n, (heads + 2 * kv_heads) * d}, gradients.q.options());
    const at::Tensor all = dqkv.view({batch, n, heads + 2 * kv_heads, d});
    rotate_into(all.narrow(2, 0, heads), gradients.q, cosine, sine, /*backward=*/true);
    rotate_into(all.narrow(2, heads, kv_heads), gradients.k, cosine, sine, /*backward=*/true);
    all.narrow(2, heads + kv_heads, kv_heads).copy_(gradients.v);
    return dqkv;
  }

  at::Tensor glu(const at::Tensor& gate_up, Activation activation) const override {
    const int64_t ffn = gate_up.size(1) / 2;
    return activated(gate_up.narrow(1, 0, ffn), activation).mul_(gate_up.narrow(1, ffn, ffn));
  }

  at::Tensor glu_backward(const at::Tensor& dout, const at::Tensor& gate_up, Activation activation) const override {
    const int64_t ffn = gate_up.size(1) / 2;
    const at::Tensor gate = gate_up.narrow(1, 0, ffn);
    at::Tensor result = at::empty_like(gate_up);
    at::Tensor dgate = result.narrow(1, 0, ffn);
    at::Tensor dup = result.narrow(1, ffn, ffn);
    at::mul_out(dup, dout, activated(gate, activation));
    const at::Tensor dactivated = dout * gate_up.narrow(1, ffn, ffn);
    activation == Activation::kSilu ? at::silu_backward_out(dgate, dactivated, gate)
                                    : at::gelu_backward_out(dgate, dactivated, gate, "tanh");
    return result;
  }

  // No more than two matrices of the size of the logits are held at once, and one of booleans.
  CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, const at::Tensor& weights, double scale,
                             std::optional<at::ScalarType> gradient) const override {
    const at::Tensor index = targets.unsqueeze(1), left_out = index.lt(0);
    at::Tensor log_p = at::_log_softmax(logits, 1, /*half_to_float=*/false);
    logits.reset();
    at::Tensor of_targets = log_p.gather(1, index.clamp_min(0)).masked_fill_(left_out, 0);
    at::Tensor factors;  // of the gradient, by row
    if (weights.defined()) {
      factors = weights.unsqueeze(1).to(log_p.scalar_type());
      of_targets.mul_(factors);
      factors = factors * scale;
    }
    CrossEntropy r{.loss = of_targets.sum().neg(), .dlogits = {}};
    if (gradient) {
      // Not scatter_: with deterministic algorithms it becomes index_put_ on a GPU, which reads its indices on the
      // host.
      const at::Tensor columns = at::arange(log_p.size(1), targets.options());
      log_p.exp_().add_(columns.eq(index), -1);
      if (factors.defined()) {
        log_p.mul_(factors);
      } else {
        log_p.mul_(scale);
      }
      r.dlogits = log_p.masked_fill_(left_out, 0).to(*gradient);
    }
    return r;
  }
};

}  // namespace

const DecoderOps& composed_ops() {
  static const ComposedOps ops;
  return ops;
}

std::vector<Charge> composed_norm_charges(int64_t rows, int64_t dim, int64_t element, int64_t wide) {
  const int64_t one = rows * dim * wide;
  const bool copies = element != wide;
  // The forward: widened, and squared or normed. The backward: normed, dnormed, their product, the term that is
  // subtracted, and wide and the difference. Without copies the first two and the last two are the operands and the
  // results.
  return {{"widened, and squared or normed", copies ? 2 * one : 0, When::kForward},
          {"temporaries of the gradient", (copies ? 6 : 4) * one, When::kBackward}};
}

int64_t composed_cross_entropy_bytes(int64_t logits, int64_t wide) {
  return logits * (2 * wide + 1);  // probabilities, where the target is, and the same as numbers to be subtracted
}

}  // namespace annulus
