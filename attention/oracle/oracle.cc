// Dense attention in plain loops; see oracle.h. The definitions of patterns are in counts.cc.
#include "attention/oracle/oracle.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace annulus {

OracleResult oracle(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& dout_in,
                    double scale, const Count& count, const PairWeight& weight, const OracleSoftmax& softmax) {
  const at::Tensor q = q_in.to(at::kDouble).contiguous(), k = k_in.to(at::kDouble).contiguous();
  const at::Tensor v = v_in.to(at::kDouble).contiguous(), dout = dout_in.to(at::kDouble).contiguous();
  const int64_t B = q.size(0), Sq = q.size(1), H = q.size(2), D = q.size(3), Sk = k.size(1), Hk = k.size(2);
  OracleResult r{at::zeros(q.sizes(), q.options()), at::zeros({B, H, Sq}, q.options()),
                 at::zeros(q.sizes(), q.options()), at::zeros(k.sizes(), q.options()),
                 at::zeros(k.sizes(), q.options())};
  const auto row = [D](const at::Tensor& t, int64_t b, int64_t s, int64_t h) {
    return t.data_ptr<double>() + ((b * t.size(1) + s) * t.size(2) + h) * D;
  };
  const auto dot = [D](const double* x, const double* y) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += x[d] * y[d];
    return sum;
  };
  const double cap = softmax.softcap;
  const at::Tensor sinks = softmax.sinks.defined() ? softmax.sinks.to(at::kDouble).contiguous() : at::Tensor();
  if (sinks.defined()) r.dsinks = at::zeros({H}, q.options());
  struct Term {
    int64_t key;
    double score, slope, weight;  // the slope is the derivative of the score by scale q.k
  };
  std::vector<Term> terms;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t hk = h / (H / Hk);
      for (int64_t i = 0; i < Sq; ++i) {
        terms.clear();
        const double sink = sinks.defined() ? sinks.data_ptr<double>()[h] : -std::numeric_limits<double>::infinity();
        double top = sink;
        for (int64_t j = 0; j < Sk; ++j) {
          const int64_t m = count(b, h, i, j);
          if (m == 0) continue;
          const double product = scale * dot(row(q, b, i, h), row(k, b, j, hk));
          const double tanh = cap > 0 ? std::tanh(product / cap) : 0;
          const double score = (cap > 0 ? cap * tanh : product) + std::log(static_cast<double>(m));
          terms.push_back({j, score, 1 - tanh * tanh, weight ? weight(b, h, i, j) : 1});
          top = std::max(top, score);
        }
        double& lse = r.lse.data_ptr<double>()[(b * H + h) * Sq + i];
        lse = sink;
        if (terms.empty()) continue;
        double sum = std::exp(sink - top);
        for (const Term& t : terms) sum += std::exp(t.score - top);
        lse = top + std::log(sum);
        double* out = row(r.out, b, i, h);
        for (const auto& [j, score, slope, w] : terms) {
          const double p = std::exp(score - lse) * w;
          const double* const value = row(v, b, j, hk);
          for (int64_t d = 0; d < D; ++d) out[d] += p * value[d];
        }
        const double* g = row(dout, b, i, h);
        const double delta = dot(g, out);
        if (sinks.defined()) r.dsinks.data_ptr<double>()[h] -= std::exp(sink - lse) * delta;
        for (const auto& [j, score, slope, w] : terms) {
          const double p = std::exp(score - lse), ds = p * (w * dot(g, row(v, b, j, hk)) - delta) * slope * scale;
          const double *const query = row(q, b, i, h), *const key = row(k, b, j, hk);
          double *const dq = row(r.dq, b, i, h), *const dk = row(r.dk, b, j, hk), *const dv = row(r.dv, b, j, hk);
          for (int64_t d = 0; d < D; ++d) {
            dq[d] += ds * key[d];
            dk[d] += ds * query[d];
            dv[d] += p * w * g[d];
          }
        }
      }
    }
  }
  return r;
}

}  // namespace annulus
