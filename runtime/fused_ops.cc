// See fused_ops.h.
#include "runtime/fused_ops.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "common/error.h"
#include "runtime/fused_loops.h"

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Sums over rows are made block by block, so that they do not depend on the number of threads.
constexpr int64_t kBlocks = 16;
constexpr int64_t kGrainElements = 16384;

bool fusable(const at::Tensor& t) {
  return t.device().is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() > 0;
}

const float* data(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }

// body(first row, rows) over all rows, in parallel.
template <typename Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_elements));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) { body(begin, end - begin); });
}

// body(block, first row, rows) for kBlocks blocks of nearly equal size, in parallel where it pays.
template <typename Body>
void for_blocks(int64_t rows, int64_t row_elements, const Body& body) {
  const int64_t grain = rows * row_elements < kBlocks * kGrainElements ? kBlocks : 1;
  at::parallel_for(0, kBlocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = b * rows / kBlocks;
      body(b, first, (b + 1) * rows / kBlocks - first);
    }
  });
}

// Contiguous, or undefined as it came.
at::Tensor dense(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

class AddRmsNorm : public Function<AddRmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& delta,
                               const at::Tensor& weight, double eps) {
    const int64_t rows = x.size(0);
    const int64_t dim = x.size(1);
    at::Tensor sum = at::empty({rows, dim}, x.options());
    at::Tensor y = at::empty({rows, dim}, x.options());
    at::Tensor inv_rms = at::empty({rows}, x.options());
    const float* px = data(x);
    const float* pd = delta ? data(*delta) : nullptr;
    const float* pw = data(weight);
    float* ps = sum.data_ptr<float>();
    float* py = y.data_ptr<float>();
    float* pi = inv_rms.data_ptr<float>();
    for_rows(rows, dim, [&](int64_t r, int64_t n) {
      const int64_t o = r * dim;
      fused::add_rms_norm(px + o, pd != nullptr ? pd + o : nullptr, pw, static_cast<float>(eps), n, dim, ps + o, py + o,
                          pi + r);
    });
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({sum, weight, inv_rms});
    ctx->saved_data["has_delta"] = delta.has_value();
    return {sum, y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const bool has_delta = ctx->saved_data["has_delta"].toBool();
    const at::Tensor& sum = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dsum = dense(grads[0]);
    const at::Tensor dy = dense(grads[1]);
    if (!dy.defined()) return {dsum, has_delta ? dsum : at::Tensor(), at::Tensor(), at::Tensor()};
    const int64_t rows = sum.size(0);
    const int64_t dim = sum.size(1);
    at::Tensor dx = at::empty({rows, dim}, sum.options());
    at::Tensor partial = at::zeros({kBlocks, dim}, sum.options());
    const float* pdy = data(dy);
    const float* pds = data(dsum);
    const float* ps = data(sum);
    const float* pw = data(weight);
    const float* pi = data(saved[2]);
    float* pdx = dx.data_ptr<float>();
    float* pp = partial.data_ptr<float>();
    for_blocks(rows, dim, [&](int64_t block, int64_t r, int64_t n) {
      const int64_t o = r * dim;
      fused::add_rms_norm_backward(pdy + o, pds != nullptr ? pds + o : nullptr, ps + o, pw, pi + r, n, dim, pdx + o,
                                   pp + block * dim);
    });
    return {dx, has_delta ? dx : at::Tensor(), partial.sum(0), at::Tensor()};
  }
};

class RotarySplit : public Function<RotarySplit> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& cosine,
                               const at::Tensor& sine, int64_t heads, int64_t kv_heads) {
    const fused::RotaryShape shape{cosine.size(0), heads, kv_heads, cosine.size(1) * 2};
    const int64_t rows = qkv.size(0);
    const int64_t batch = rows / shape.positions;
    at::Tensor q = at::empty({batch, shape.positions, heads, shape.head_dim}, qkv.options());
    at::Tensor k = at::empty({batch, shape.positions, kv_heads, shape.head_dim}, qkv.options());
    at::Tensor v = at::empty({batch, shape.positions, kv_heads, shape.head_dim}, qkv.options());
    const float* in = data(qkv);
    const float* c = data(cosine);
    const float* s = data(sine);
    float* pq = q.data_ptr<float>();
    float* pk = k.data_ptr<float>();
    float* pv = v.data_ptr<float>();
    for_rows(rows, qkv.size(1), [&](int64_t r, int64_t n) { fused::rotary_split(in, c, s, shape, r, n, pq, pk, pv); });
    ctx->save_for_backward({cosine, sine});
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["kv_heads"] = kv_heads;
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor dq = dense(grads[0]);
    const at::Tensor dk = dense(grads[1]);
    const at::Tensor dv = dense(grads[2]);
    const fused::RotaryShape shape{saved[0].size(0), ctx->saved_data["heads"].toInt(),
                                   ctx->saved_data["kv_heads"].toInt(), saved[0].size(1) * 2};
    const int64_t rows = dq.size(0) * dq.size(1);
    const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    at::Tensor dqkv = at::empty({rows, width}, dq.options());
    const float* c = data(saved[0]);
    const float* s = data(saved[1]);
    float* out = dqkv.data_ptr<float>();
    for_rows(rows, width, [&](int64_t r, int64_t n) {
      fused::rotary_split_backward(data(dq), data(dk), data(dv), c, s, shape, r, n, out);
    });
    return {dqkv, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class SwiGlu : public Function<SwiGlu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up) {
    const int64_t ffn = gate_up.size(1) / 2;
    at::Tensor out = at::empty({gate_up.size(0), ffn}, gate_up.options());
    const float* in = data(gate_up);
    float* po = out.data_ptr<float>();
    for_rows(gate_up.size(0), 2 * ffn,
             [&](int64_t r, int64_t n) { fused::swiglu(in + r * 2 * ffn, n, ffn, po + r * ffn); });
    ctx->save_for_backward({gate_up});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const at::Tensor dout = dense(grads[0]);
    const int64_t ffn = gate_up.size(1) / 2;
    at::Tensor din = at::empty_like(gate_up);
    const float* in = data(gate_up);
    const float* pd = data(dout);
    float* po = din.data_ptr<float>();
    for_rows(gate_up.size(0), 2 * ffn, [&](int64_t r, int64_t n) {
      fused::swiglu_backward(pd + r * ffn, in + r * 2 * ffn, n, ffn, po + r * 2 * ffn);
    });
    return {din};
  }
};

// The gradient with respect to the logits is made together with the loss, while they are in the cache.
class CrossEntropySum : public Function<CrossEntropySum> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets, double scale,
                            bool with_gradient) {
    const int64_t vocab = logits.size(1);
    at::Tensor dlogits = with_gradient ? at::empty_like(logits) : at::Tensor();
    const float* pl = data(logits);
    const int64_t* pt = targets.const_data_ptr<int64_t>();
    float* pd = with_gradient ? dlogits.data_ptr<float>() : nullptr;
    std::vector<double> partial(kBlocks, 0.0);
    for_blocks(logits.size(0), vocab, [&](int64_t block, int64_t r, int64_t n) {
      const int64_t o = r * vocab;
      partial[block] =
          fused::cross_entropy(pl + o, pt + r, n, vocab, static_cast<float>(scale), pd != nullptr ? pd + o : nullptr);
    });
    double loss = 0;
    for (const double p : partial) loss += p;
    if (with_gradient) ctx->save_for_backward({dlogits});
    return at::scalar_tensor(loss * scale, logits.options());
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    at::Tensor dlogits = ctx->get_saved_variables()[0];
    if (grads[0].item<float>() != 1.0F) dlogits = dlogits * grads[0];
    return {dlogits, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void check_targets(const at::Tensor& targets, int64_t vocab) {
  const int64_t* p = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    if (p[i] < 0 || p[i] >= vocab) {
      throw Error(ErrorKind::kInput, "model",
                  "token " + std::to_string(p[i]) + " is outside the vocabulary [0, " + std::to_string(vocab) +
                      "): set model.vocab to hold every token of the data");
    }
  }
}

}  // namespace

Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  if (fusable(x) && fusable(weight) && (!delta.defined() || fusable(delta))) {
    const variable_list out =
        AddRmsNorm::apply(x, delta.defined() ? std::optional<at::Tensor>(delta) : std::nullopt, weight, eps);
    return {out[0], out[1]};
  }
  const at::Tensor sum = delta.defined() ? x + delta : x;
  return {sum, sum * at::rsqrt(sum.square().mean(-1, /*keepdim=*/true) + eps) * weight};
}

Heads rotary_split(const at::Tensor& qkv, const RotaryTable& table, int64_t heads, int64_t kv_heads) {
  const int64_t n = table.cosine.size(0);
  const int64_t head_dim = table.cosine.size(1) * 2;
  if (fusable(qkv) && fusable(table.cosine)) {
    const variable_list out = RotarySplit::apply(qkv, table.cosine, table.sine, heads, kv_heads);
    return {out[0], out[1], out[2]};
  }
  const at::Tensor all = qkv.view({qkv.size(0) / n, n, heads + 2 * kv_heads, head_dim});
  return {rotate(all.narrow(2, 0, heads), table), rotate(all.narrow(2, heads, kv_heads), table),
          all.narrow(2, heads + kv_heads, kv_heads).contiguous()};
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  if (fusable(gate_up)) return SwiGlu::apply(gate_up);
  const int64_t ffn = gate_up.size(1) / 2;
  return at::silu(gate_up.narrow(1, 0, ffn)) * gate_up.narrow(1, ffn, ffn);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets, double scale) {
  if (fusable(logits) && targets.is_contiguous()) {
    check_targets(targets, logits.size(1));
    return CrossEntropySum::apply(logits, targets, scale, at::GradMode::is_enabled() && logits.requires_grad());
  }
  return at::nll_loss(at::log_softmax(logits, -1), targets, {}, at::Reduction::Sum) * scale;
}

}  // namespace annulus
