// See fused_ops.h.
#include "model/fused_ops.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "model/composed_ops.h"
#include "model/fused_loops.h"
#include "model/products.h"

namespace annulus {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Sums over rows are computed block by block, so that they do not depend on the number of threads.
constexpr int64_t kBlocks = 16;
constexpr int64_t kGrainElements = 16384;

bool fusable(const at::Tensor& t) {
  return t.device().is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() > 0;
}

const float* data(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }

// Calls body(first row, rows) over all rows, in parallel.
template <typename Body>
void for_rows(int64_t rows, int64_t row_elements, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_elements));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) { body(begin, end - begin); });
}

// Calls body(block, first row, rows) for kBlocks blocks of nearly equal size, in parallel if that pays.
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

// Makes a tensor contiguous; an undefined one stays undefined.
at::Tensor dense(const at::Tensor& t) { return t.defined() ? t.contiguous() : t; }

class AddRmsNorm : public Function<AddRmsNorm> {
 public:
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const std::optional<at::Tensor>& delta,
                               const at::Tensor& weight, double eps) {
    composed::RmsNorm r;
    if (fusable(x) && fusable(weight) && (!delta || fusable(*delta))) {
      const int64_t rows = x.size(0);
      const int64_t dim = x.size(1);
      r = {at::empty({rows, dim}, x.options()), at::empty({rows, dim}, x.options()), at::empty({rows}, x.options())};
      const float* px = data(x);
      const float* pd = delta ? data(*delta) : nullptr;
      const float* pw = data(weight);
      float* ps = r.sum.data_ptr<float>();
      float* py = r.y.data_ptr<float>();
      float* pi = r.inv_rms.data_ptr<float>();
      for_rows(rows, dim, [&](int64_t row, int64_t n) {
        const int64_t o = row * dim;
        fused::add_rms_norm(px + o, pd != nullptr ? pd + o : nullptr, pw, static_cast<float>(eps), n, dim, ps + o,
                            py + o, pi + row);
      });
    } else {
      r = composed::add_rms_norm(x, delta.value_or(at::Tensor()), weight, eps);
    }
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({r.sum, weight, r.inv_rms});
    ctx->saved_data["has_delta"] = delta.has_value();
    return {r.sum, r.y};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const bool has_delta = ctx->saved_data["has_delta"].toBool();
    const at::Tensor& sum = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor dsum = dense(grads[0]);
    const at::Tensor dy = dense(grads[1]);
    if (!dy.defined()) return {dsum, has_delta ? dsum : at::Tensor(), at::Tensor(), at::Tensor()};
    composed::RmsNormGradient g;
    if (fusable(sum)) {
      const int64_t rows = sum.size(0);
      const int64_t dim = sum.size(1);
      g.dx = at::empty({rows, dim}, sum.options());
      at::Tensor partial = at::zeros({kBlocks, dim}, sum.options());
      const float* pdy = data(dy);
      const float* pds = data(dsum);
      const float* ps = data(sum);
      const float* pw = data(weight);
      const float* pi = data(saved[2]);
      float* pdx = g.dx.data_ptr<float>();
      float* pp = partial.data_ptr<float>();
      for_blocks(rows, dim, [&](int64_t block, int64_t r, int64_t n) {
        const int64_t o = r * dim;
        fused::add_rms_norm_backward(pdy + o, pds != nullptr ? pds + o : nullptr, ps + o, pw, pi + r, n, dim, pdx + o,
                                     pp + block * dim);
      });
      g.dweight = partial.sum(0);
    } else {
      g = composed::add_rms_norm_backward(dy, dsum, sum, weight, saved[2]);
    }
    return {g.dx, has_delta ? g.dx : at::Tensor(), g.dweight, at::Tensor()};
  }
};

class HeadNorm : public Function<HeadNorm> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& q_weight,
                            const at::Tensor& k_weight, int64_t heads, int64_t kv_heads, double eps) {
    const int64_t rows = qkv.size(0), d = q_weight.size(0), width = qkv.size(1);
    at::Tensor out = at::empty_like(qkv);
    at::Tensor inv_rms = at::empty({rows, heads + kv_heads}, qkv.options().dtype(at::toOpMathType(qkv.scalar_type())));
    if (fusable(qkv) && fusable(q_weight)) {
      const float *in = data(qkv), *wq = data(q_weight), *wk = data(k_weight);
      float *po = out.data_ptr<float>(), *pi = inv_rms.data_ptr<float>();
      for_rows(rows, width, [&](int64_t first, int64_t n) {
        for (int64_t r = first; r < first + n; ++r) {
          const float* x = in + r * width;
          float *y = po + r * width, *inv = pi + r * (heads + kv_heads);
          const int64_t k = heads * d, v = k + kv_heads * d;
          // The sum, which equals the input, is written where the result then replaces it.
          fused::add_rms_norm(x, nullptr, wq, static_cast<float>(eps), heads, d, y, y, inv);
          fused::add_rms_norm(x + k, nullptr, wk, static_cast<float>(eps), kv_heads, d, y + k, y + k, inv + heads);
          std::copy(x + v, x + width, y + v);
        }
      });
    } else {
      for (const auto& [from, count, weight] : parts(q_weight, k_weight, heads, kv_heads)) {
        const composed::RmsNorm r = composed::add_rms_norm(flat(qkv, from, count, d), {}, weight, eps);
        out.narrow(1, from * d, count * d).copy_(r.y.view({rows, count * d}));
        inv_rms.narrow(1, from, count).copy_(r.inv_rms.view({rows, count}));
      }
      const int64_t v = (heads + kv_heads) * d;
      out.narrow(1, v, width - v).copy_(qkv.narrow(1, v, width - v));
    }
    ctx->save_for_backward({qkv, q_weight, k_weight, inv_rms});
    ctx->saved_data["heads"] = heads;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &qkv = saved[0], &q_weight = saved[1], &k_weight = saved[2], &inv_rms = saved[3];
    const at::Tensor dy = dense(grads[0]);
    const int64_t rows = qkv.size(0), d = q_weight.size(0), width = qkv.size(1);
    const int64_t heads = ctx->saved_data["heads"].toInt(), kv_heads = inv_rms.size(1) - heads;
    at::Tensor dqkv = at::empty_like(qkv);
    variable_list result(6);
    if (fusable(qkv) && fusable(dy)) {
      at::Tensor partial = at::zeros({kBlocks, 2 * d}, qkv.options());
      const float *pdy = data(dy), *in = data(qkv), *wq = data(q_weight), *wk = data(k_weight), *pi = data(inv_rms);
      float *po = dqkv.data_ptr<float>(), *pp = partial.data_ptr<float>();
      for_blocks(rows, width, [&](int64_t block, int64_t first, int64_t n) {
        float* dweight = pp + block * 2 * d;
        for (int64_t r = first; r < first + n; ++r) {
          const float *x = in + r * width, *dyr = pdy + r * width, *inv = pi + r * (heads + kv_heads);
          float* dx = po + r * width;
          const int64_t k = heads * d, v = k + kv_heads * d;
          fused::add_rms_norm_backward(dyr, nullptr, x, wq, inv, heads, d, dx, dweight);
          fused::add_rms_norm_backward(dyr + k, nullptr, x + k, wk, inv + heads, kv_heads, d, dx + k, dweight + d);
          std::copy(dyr + v, dyr + width, dx + v);
        }
      });
      const at::Tensor sums = partial.sum(0);
      result[1] = sums.narrow(0, 0, d);
      result[2] = sums.narrow(0, d, d);
    } else {
      size_t i = 1;
      for (const auto& [from, count, weight] : parts(q_weight, k_weight, heads, kv_heads)) {
        const composed::RmsNormGradient g =
            composed::add_rms_norm_backward(flat(dy, from, count, d), {}, flat(qkv, from, count, d), weight,
                                            inv_rms.narrow(1, from, count).reshape({rows * count, 1}));
        dqkv.narrow(1, from * d, count * d).copy_(g.dx.view({rows, count * d}));
        result[i++] = g.dweight;
      }
      const int64_t v = (heads + kv_heads) * d;
      dqkv.narrow(1, v, width - v).copy_(dy.narrow(1, v, width - v));
    }
    result[0] = dqkv;
    return result;
  }

 private:
  struct Heads {
    int64_t from, count;  // in heads
    const at::Tensor& weight;
  };
  static std::array<Heads, 2> parts(const at::Tensor& q, const at::Tensor& k, int64_t heads, int64_t kv_heads) {
    return {{{0, heads, q}, {heads, kv_heads, k}}};
  }
  // Some heads of each row as rows of their own: [rows * count, head_dim].
  static at::Tensor flat(const at::Tensor& t, int64_t from, int64_t count, int64_t head_dim) {
    return t.narrow(1, from * head_dim, count * head_dim).reshape({-1, head_dim});
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
    if (fusable(qkv) && fusable(cosine)) {
      const float* in = data(qkv);
      const float* c = data(cosine);
      const float* s = data(sine);
      float* pq = q.data_ptr<float>();
      float* pk = k.data_ptr<float>();
      float* pv = v.data_ptr<float>();
      for_rows(rows, qkv.size(1),
               [&](int64_t r, int64_t n) { fused::rotary_split(in, c, s, shape, r, n, pq, pk, pv); });
    } else {
      const at::Tensor all = qkv.view({batch, shape.positions, heads + 2 * kv_heads, shape.head_dim});
      composed::rotate_into(q, all.narrow(2, 0, heads), cosine, sine, /*backward=*/false);
      composed::rotate_into(k, all.narrow(2, heads, kv_heads), cosine, sine, /*backward=*/false);
      v.copy_(all.narrow(2, heads + kv_heads, kv_heads));
    }
    ctx->save_for_backward({cosine, sine});
    ctx->saved_data["heads"] = heads;
    ctx->saved_data["kv_heads"] = kv_heads;
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& cosine = saved[0];
    const at::Tensor& sine = saved[1];
    const at::Tensor dq = dense(grads[0]);
    const at::Tensor dk = dense(grads[1]);
    const at::Tensor dv = dense(grads[2]);
    const fused::RotaryShape shape{cosine.size(0), ctx->saved_data["heads"].toInt(),
                                   ctx->saved_data["kv_heads"].toInt(), cosine.size(1) * 2};
    const int64_t rows = dq.size(0) * dq.size(1);
    const int64_t all_heads = shape.heads + 2 * shape.kv_heads;
    at::Tensor dqkv = at::empty({rows, all_heads * shape.head_dim}, dq.options());
    if (fusable(dq) && fusable(cosine)) {
      const float* c = data(cosine);
      const float* s = data(sine);
      float* out = dqkv.data_ptr<float>();
      for_rows(rows, dqkv.size(1), [&](int64_t r, int64_t n) {
        fused::rotary_split_backward(data(dq), data(dk), data(dv), c, s, shape, r, n, out);
      });
    } else {
      const at::Tensor all = dqkv.view({dq.size(0), shape.positions, all_heads, shape.head_dim});
      composed::rotate_into(all.narrow(2, 0, shape.heads), dq, cosine, sine, /*backward=*/true);
      composed::rotate_into(all.narrow(2, shape.heads, shape.kv_heads), dk, cosine, sine, /*backward=*/true);
      all.narrow(2, shape.heads + shape.kv_heads, shape.kv_heads).copy_(dv);
    }
    return {dqkv, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class SwiGlu : public Function<SwiGlu> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    if (!fusable(gate_up)) return composed::swiglu(gate_up);
    const int64_t ffn = gate_up.size(1) / 2;
    at::Tensor out = at::empty({gate_up.size(0), ffn}, gate_up.options());
    const float* in = data(gate_up);
    float* po = out.data_ptr<float>();
    for_rows(gate_up.size(0), 2 * ffn,
             [&](int64_t r, int64_t n) { fused::swiglu(in + r * 2 * ffn, n, ffn, po + r * ffn); });
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const at::Tensor dout = dense(grads[0]);
    if (!fusable(gate_up)) return {composed::swiglu_backward(dout, gate_up)};
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

// composed::cross_entropy as one pass, in which the gradient overwrites the logits.
composed::CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, double scale, bool with_gradient) {
  if (!fusable(logits)) return composed::cross_entropy(std::move(logits), targets, scale, with_gradient);
  const int64_t vocab = logits.size(1);
  float* pl = logits.data_ptr<float>();
  const int64_t* pt = targets.const_data_ptr<int64_t>();
  std::vector<double> partial(kBlocks, 0.0);
  for_blocks(logits.size(0), vocab, [&](int64_t block, int64_t r, int64_t n) {
    float* p = pl + r * vocab;
    partial[block] = fused::cross_entropy(p, pt + r, n, vocab, static_cast<float>(scale), with_gradient ? p : nullptr);
  });
  const double loss = std::accumulate(partial.begin(), partial.end(), 0.0);
  return {at::scalar_tensor(loss, logits.options().dtype(at::kDouble)), with_gradient ? logits : at::Tensor()};
}

class LinearCrossEntropySum : public Function<LinearCrossEntropySum> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& head,
                            const at::Tensor& targets, double scale, int64_t chunk_rows, bool with_gradient) {
    const int64_t rows = hidden.size(0);
    at::Tensor loss;
    at::Tensor dhidden = with_gradient ? at::empty_like(hidden) : at::Tensor();
    at::Tensor dhead;
    for (int64_t first = 0; first < rows; first += chunk_rows) {
      const int64_t n = std::min(chunk_rows, rows - first);
      const at::Tensor part = hidden.narrow(0, first, n);
      composed::CrossEntropy c =
          cross_entropy(wide_product(part, head.t()), targets.narrow(0, first, n), scale, with_gradient);
      loss = loss.defined() ? loss.add_(c.loss) : c.loss;
      if (!with_gradient) continue;
      const at::Tensor dlogits = std::exchange(c.dlogits, {}).to(hidden.scalar_type());
      product_into(dhidden.narrow(0, first, n), dlogits, head);
      const at::Tensor dhead_part = wide_product(dlogits.t(), part);
      dhead = dhead.defined() ? dhead.add_(dhead_part) : dhead_part;
    }
    if (with_gradient) ctx->save_for_backward({dhidden, dhead.to(head.scalar_type())});
    return loss.mul_(scale).to(at::toOpMathType(hidden.scalar_type()));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result = ctx->get_saved_variables();
    // A training step begins its backward with 1. On a GPU, to read the number would be to wait for the device.
    if (!grads[0].is_cpu() || grads[0].item<double>() != 1) {
      for (at::Tensor& t : result) t = t * grads[0];
    }
    result.resize(6);  // undefined gradients of targets, scale, chunk_rows and with_gradient
    return result;
  }
};

}  // namespace

Normed add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps) {
  const variable_list out =
      AddRmsNorm::apply(x, delta.defined() ? std::optional<at::Tensor>(delta) : std::nullopt, weight, eps);
  return {out[0], out[1]};
}

at::Tensor head_norm(const at::Tensor& qkv, const at::Tensor& q_weight, const at::Tensor& k_weight, int64_t heads,
                     int64_t kv_heads, double eps) {
  return HeadNorm::apply(qkv, q_weight, k_weight, heads, kv_heads, eps);
}

Heads rotary_split(const at::Tensor& qkv, const RotaryTable& table, int64_t heads, int64_t kv_heads) {
  const variable_list out = RotarySplit::apply(qkv, table.cosine, table.sine, heads, kv_heads);
  return {out[0], out[1], out[2]};
}

at::Tensor swiglu(const at::Tensor& gate_up) { return SwiGlu::apply(gate_up); }

int64_t loss_chunk_rows(int64_t vocab, at::ScalarType dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  return std::max<int64_t>(1, kLossChunkBytes / (vocab * element));
}

int64_t Computes::wide() const { return static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype))); }

Part norm_charges(int64_t rows, int64_t dim, bool with_sum, const Computes& on) {
  const int64_t all = rows * dim * on.element();
  Part part{kNormPart,
            {{"sum", all, When::kKept},
             {"statistics", rows * on.wide(), When::kKept},
             {"what is added, and the result", 2 * all, When::kForward},
             {kGivenGradient, with_sum ? all : 0, When::kBackward},
             {"gradients of the normed and of the sum", 2 * all, When::kBackward}}};
  for (const Charge& charge : composed::norm_charges(rows, dim, on.loops() || on.gpu ? 0 : on.wide())) {
    part.charges.push_back(charge);
  }
  return part;
}

Part head_norm_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on) {
  const int64_t all = rows * (heads + 2 * kv_heads) * head_dim * on.element();
  Part part{"norm of heads",
            {{"projection", all, When::kKept},
             {"statistics", rows * (heads + kv_heads) * on.wide(), When::kKept},
             {"result", all, When::kForward},
             {kGivenGradient, all, When::kBackward},
             {"gradient of the projection", all, When::kBackward}}};
  if (on.loops()) return part;
  // The queries alone, as rows of heads, and what their norm takes.
  const int64_t queries = rows * heads * head_dim * on.element();
  part.charges.push_back({"queries and their norm", 2 * queries, When::kForward});
  part.charges.push_back({"queries and their gradients", 3 * queries, When::kBackward});
  for (const Charge& charge : composed::norm_charges(rows * heads, head_dim, on.gpu ? 0 : on.wide())) {
    part.charges.push_back(charge);
  }
  return part;
}

Part rotary_charges(int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const Computes& on) {
  const int64_t all = rows * (heads + 2 * kv_heads) * head_dim * on.element();
  // Half of the queries at a time, in the table's dtype.
  const int64_t working = on.loops() ? 0 : rows * heads * head_dim / 2 * on.wide();
  return {"rotary",
          {{"projection, and queries, keys and values", 2 * all, When::kForward},
           {"half of the queries", working, When::kForward},
           {kGivenGradient, all, When::kBackward},
           {"gradient of the projection", all, When::kBackward},
           {"half of the queries", working, When::kBackward}}};
}

Part swiglu_charges(int64_t rows, int64_t ffn, const Computes& on) {
  const int64_t one = rows * ffn * on.element();
  return {"swiglu",
          {{"gate and up", 2 * one, When::kKept},
           {"product", one, When::kForward},
           {kGivenGradient, one, When::kBackward},
           {"gradients of gate and up", 2 * one, When::kBackward},
           {"a temporary of composed operators", on.loops() ? 0 : one, When::kBackward}}};
}

Part loss_charges(int64_t rows, int64_t dim, int64_t vocab, const Computes& on) {
  const int64_t e = on.element(), wide = on.wide();
  const int64_t chunk = std::min(rows, loss_chunk_rows(vocab, on.dtype)), logits = chunk * vocab, head = vocab * dim;
  const bool several = chunk < rows, copies = e != wide;
  // What a chunk holds, one after the other: its logits, which composed operators hold twice (on a CPU they are fp32,
  // so the loops run); their gradient, and the head's gradient from it, which is added to that of the chunks before; on
  // a CPU, the factors of the products in the wider dtype.
  const int64_t before = several ? head * wide : 0;
  const int64_t widened = copies && !on.gpu ? wide * (chunk * dim + std::max(head, logits)) : 0;
  const int64_t of_logits = (on.gpu ? 2 : 1) * logits * wide + before;
  const int64_t of_product = logits * wide + before + (copies && !on.gpu ? wide * (chunk * dim + head) : 0) +
                             (on.loops() ? chunk * dim * e : 0);  // product_into
  const int64_t of_gradient = logits * e + head * wide + before + widened;
  const int64_t of_cast = copies ? logits * (wide + e) + before : 0;
  const int64_t most = std::max({of_logits, of_product, of_gradient, of_cast, head * (copies ? wide + e : wide)});
  return {"loss",
          {{"gradient of the hidden states", rows * dim * e, When::kKept},
           {"gradient of the head", head * e, When::kKept},
           {"hidden states", rows * dim * e, When::kForward},
           {"a chunk of logits, and gradients", most - head * e, When::kForward}}};
}

at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                    double scale, int64_t chunk_rows) {
  const int64_t vocab = head.size(0);
  if (targets.is_cpu()) check_tokens(targets, vocab, /*lowest=*/-1);
  if (chunk_rows <= 0) chunk_rows = loss_chunk_rows(vocab, hidden.scalar_type());
  return LinearCrossEntropySum::apply(hidden, head, targets, scale, chunk_rows,
                                      at::GradMode::is_enabled() && (hidden.requires_grad() || head.requires_grad()));
}

void check_tokens(const at::Tensor& tokens, int64_t vocab, int64_t lowest) {
  const int64_t* p = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    if (p[i] < lowest || p[i] >= vocab) {
      throw Error(ErrorKind::kInput, "model",
                  "token " + std::to_string(p[i]) + " is outside the vocabulary [0, " + std::to_string(vocab) +
                      "): set model.vocab to hold every token of the data");
    }
  }
}

}  // namespace annulus
