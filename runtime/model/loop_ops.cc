// See choose_ops.h.
#include "runtime/model/choose_ops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "runtime/model/fused_loops.h"

namespace annulus {
namespace {

using fused::loops;

// Sums over rows are computed block by block, so that they do not depend on the number of threads.
constexpr int64_t kBlocks = 16;
constexpr int64_t kGrainElements = 16384;

const float* data(const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; }
fused::NormFactor data(const NormWeight& w) { return {data(w.weight), static_cast<float>(w.offset)}; }

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

// Calls body(first row, rows, sums) for some of the rows first, ..., first + rows - 1 at a time, which adds to `sums`
// what they give the gradients of `width` weights, and adds these sums to `total`. A single sum over the tokens of a
// long row would be off by more the longer it is. A row has `terms` terms.
template <typename Body>
void add_up_rows(int64_t first, int64_t rows, int64_t terms, int64_t width, float* total, const Body& body) {
  constexpr int64_t kTerms = 128;  // of a sum
  const int64_t most = std::max<int64_t>(1, kTerms / terms);
  std::vector<float> sums(static_cast<size_t>(width));
  for (int64_t r = 0; r < rows; r += most) {
    std::fill(sums.begin(), sums.end(), 0.0F);
    body(first + r, std::min(most, rows - r), sums.data());
    for (int64_t i = 0; i < width; ++i) total[i] += sums[static_cast<size_t>(i)];
  }
}

class LoopOps : public DecoderOps {
 public:
  RmsNorm add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const NormWeight& weight,
                       double eps) const override {
    const int64_t rows = x.size(0), dim = x.size(1);
    RmsNorm r{at::empty({rows, dim}, x.options()), at::empty({rows, dim}, x.options()), at::empty({rows}, x.options())};
    const float *px = data(x), *pd = data(delta);
    const fused::NormFactor pw = data(weight);
    float *ps = r.sum.data_ptr<float>(), *py = r.y.data_ptr<float>(), *pi = r.inv_rms.data_ptr<float>();
    for_rows(rows, dim, [&](int64_t row, int64_t n) {
      const int64_t o = row * dim;
      loops().add_rms_norm(px + o, pd != nullptr ? pd + o : nullptr, pw, static_cast<float>(eps), n, dim, ps + o,
                           py + o, pi + row);
    });
    return r;
  }

  RmsNormGradient add_rms_norm_backward(const at::Tensor& dy, const at::Tensor& dsum, const at::Tensor& sum,
                                        const NormWeight& weight, const at::Tensor& inv_rms) const override {
    const int64_t rows = sum.size(0), dim = sum.size(1);
    const at::Tensor dx = at::empty({rows, dim}, sum.options()), partial = at::zeros({kBlocks, dim}, sum.options());
    const float *pdy = data(dy), *pds = data(dsum), *ps = data(sum), *pi = data(inv_rms);
    const fused::NormFactor pw = data(weight);
    float *pdx = dx.data_ptr<float>(), *pp = partial.data_ptr<float>();
    for_blocks(rows, dim, [&](int64_t block, int64_t first, int64_t count) {
      add_up_rows(first, count, 1, dim, pp + block * dim, [&](int64_t r, int64_t n, float* dweight) {
        const int64_t o = r * dim;
        loops().add_rms_norm_backward(pdy + o, pds != nullptr ? pds + o : nullptr, ps + o, pw, pi + r, n, dim, pdx + o,
                                      dweight);
      });
    });
    return {dx, partial.sum(0)};
  }

  HeadNormed head_norm(const at::Tensor& qkv, const NormWeight& q_weight, const NormWeight& k_weight, int64_t heads,
                       int64_t kv_heads, double eps) const override {
    const int64_t rows = qkv.size(0), d = q_weight.weight.size(0), width = qkv.size(1);
    const HeadNormed r{at::empty_like(qkv), at::empty({rows, heads + kv_heads}, qkv.options())};
    const float* in = data(qkv);
    const fused::NormFactor wq = data(q_weight), wk = data(k_weight);
    float *po = r.y.data_ptr<float>(), *pi = r.inv_rms.data_ptr<float>();
    for_rows(rows, width, [&](int64_t first, int64_t n) {
      for (int64_t row = first; row < first + n; ++row) {
        const float* x = in + row * width;
        float *y = po + row * width, *inv = pi + row * (heads + kv_heads);
        const int64_t k = heads * d, v = k + kv_heads * d;
        // The sum, which equals the input, is written where the result then replaces it.
        loops().add_rms_norm(x, nullptr, wq, static_cast<float>(eps), heads, d, y, y, inv);
        loops().add_rms_norm(x + k, nullptr, wk, static_cast<float>(eps), kv_heads, d, y + k, y + k, inv + heads);
        std::copy(x + v, x + width, y + v);
      }
    });
    return r;
  }

  HeadNormGradient head_norm_backward(const at::Tensor& dy, const at::Tensor& qkv, const NormWeight& q_weight,
                                      const NormWeight& k_weight, const at::Tensor& inv_rms,
                                      int64_t heads) const override {
    const int64_t rows = qkv.size(0), d = q_weight.weight.size(0), width = qkv.size(1),
                  kv_heads = inv_rms.size(1) - heads;
    const at::Tensor dqkv = at::empty_like(qkv), partial = at::zeros({kBlocks, 2 * d}, qkv.options());
    const float *pdy = data(dy), *in = data(qkv), *pi = data(inv_rms);
    const fused::NormFactor wq = data(q_weight), wk = data(k_weight);
    float *po = dqkv.data_ptr<float>(), *pp = partial.data_ptr<float>();
    for_blocks(rows, width, [&](int64_t block, int64_t first_of_block, int64_t count) {
      float* const total = pp + block * 2 * d;
      add_up_rows(first_of_block, count, heads, 2 * d, total, [&](int64_t first, int64_t n, float* dweight) {
        for (int64_t r = first; r < first + n; ++r) {
          const float *x = in + r * width, *dyr = pdy + r * width, *inv = pi + r * (heads + kv_heads);
          float* dx = po + r * width;
          const int64_t k = heads * d, v = k + kv_heads * d;
          loops().add_rms_norm_backward(dyr, nullptr, x, wq, inv, heads, d, dx, dweight);
          loops().add_rms_norm_backward(dyr + k, nullptr, x + k, wk, inv + heads, kv_heads, d, dx + k, dweight + d);
          std::copy(dyr + v, dyr + width, dx + v);
        }
      });
    });
    const at::Tensor sums = partial.sum(0);
    return {dqkv, sums.narrow(0, 0, d), sums.narrow(0, d, d)};
  }

  Heads rotary_split(const at::Tensor& qkv, const at::Tensor& cosine, const at::Tensor& sine, int64_t heads,
                     int64_t kv_heads) const override {
    const fused::RotaryShape shape{cosine.size(0), heads, kv_heads, cosine.size(1) * 2};
    const int64_t rows = qkv.size(0), batch = rows / shape.positions;
    const Heads to{at::empty({batch, shape.positions, heads, shape.head_dim}, qkv.options()),
                   at::empty({batch, shape.positions, kv_heads, shape.head_dim}, qkv.options()),
                   at::empty({batch, shape.positions, kv_heads, shape.head_dim}, qkv.options())};
    const float *in = data(qkv), *c = data(cosine), *s = data(sine);
    float *pq = to.q.data_ptr<float>(), *pk = to.k.data_ptr<float>(), *pv = to.v.data_ptr<float>();
    for_rows(rows, qkv.size(1), [&](int64_t r, int64_t n) { loops().rotary_split(in, c, s, shape, r, n, pq, pk, pv); });
    return to;
  }

  at::Tensor rotary_split_backward(const Heads& gradients, const at::Tensor& cosine,
                                   const at::Tensor& sine) const override {
    const fused::RotaryShape shape{cosine.size(0), gradients.q.size(2), gradients.k.size(2), cosine.size(1) * 2};
    const int64_t rows = gradients.q.size(0) * gradients.q.size(1);
    at::Tensor dqkv = at::empty({rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim}, gradients.q.options());
    const float *dq = data(gradients.q), *dk = data(gradients.k), *dv = data(gradients.v);
    const float *c = data(cosine), *s = data(sine);
    float* out = dqkv.data_ptr<float>();
    for_rows(rows, dqkv.size(1),
             [&](int64_t r, int64_t n) { loops().rotary_split_backward(dq, dk, dv, c, s, shape, r, n, out); });
    return dqkv;
  }

  at::Tensor glu(const at::Tensor& gate_up, Activation activation) const override {
    const auto loop = activation == Activation::kSilu ? loops().swiglu : loops().geglu;
    const int64_t ffn = gate_up.size(1) / 2;
    at::Tensor out = at::empty({gate_up.size(0), ffn}, gate_up.options());
    const float* in = data(gate_up);
    float* po = out.data_ptr<float>();
    for_rows(gate_up.size(0), 2 * ffn, [&](int64_t r, int64_t n) { loop(in + r * 2 * ffn, n, ffn, po + r * ffn); });
    return out;
  }

  at::Tensor glu_backward(const at::Tensor& dout, const at::Tensor& gate_up, Activation activation) const override {
    const auto loop = activation == Activation::kSilu ? loops().swiglu_backward : loops().geglu_backward;
    const int64_t ffn = gate_up.size(1) / 2;
    at::Tensor din = at::empty_like(gate_up);
    const float *in = data(gate_up), *pd = data(dout);
    float* po = din.data_ptr<float>();
    for_rows(gate_up.size(0), 2 * ffn,
             [&](int64_t r, int64_t n) { loop(pd + r * ffn, in + r * 2 * ffn, n, ffn, po + r * 2 * ffn); });
    return din;
  }

  // The gradient overwrites the logits.
  CrossEntropy cross_entropy(at::Tensor logits, const at::Tensor& targets, const at::Tensor& weights, double scale,
                             std::optional<at::ScalarType> gradient) const override {
    const int64_t vocab = logits.size(1);
    float* pl = logits.data_ptr<float>();
    const int64_t* pt = targets.const_data_ptr<int64_t>();
    const float* pw = data(weights);
    std::vector<double> partial(kBlocks, 0.0);
    for_blocks(logits.size(0), vocab, [&](int64_t block, int64_t r, int64_t n) {
      float* p = pl + r * vocab;
      partial[block] = loops().cross_entropy(p, pt + r, pw != nullptr ? pw + r : nullptr, n, vocab,
                                             static_cast<float>(scale), gradient ? p : nullptr);
    });
    const double loss = std::accumulate(partial.begin(), partial.end(), 0.0);
    return {at::scalar_tensor(loss, logits.options().dtype(at::kDouble)),
            gradient ? logits.to(*gradient) : at::Tensor()};
  }
};

}  // namespace

bool loops_take(const at::Tensor& t) {
  return t.device().is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() > 0;
}

const DecoderOps& loop_ops() {
  static const LoopOps ops;
  return ops;
}

}  // namespace annulus
