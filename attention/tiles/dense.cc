// Dense attention with LibTorch's operators; see dense.h.
#include "attention/tiles/dense.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace annulus {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// [b, hk, m, D] -> [b, h, m, D]: the kv head that each query head reads.
at::Tensor for_query_heads(const at::Tensor& kv, int64_t heads) {
  return kv.size(1) == heads ? kv : kv.repeat_interleave(heads / kv.size(1), 1);
}

// [b, h, m, D] -> [b, hk, m, D]: the sum of the gradients of all query heads that read a kv head.
at::Tensor sum_to_kv_heads(const at::Tensor& grad, int64_t kv_heads) {
  if (grad.size(1) == kv_heads) return grad;
  return grad.unflatten(1, {kv_heads, grad.size(1) / kv_heads}).sum(2);
}

// The product a [.., n, m] x b [.., m, D], where the hidden entries of a are exact zeros and 0 x inf must stay 0. If b
// is finite, this is the plain product. Otherwise the terms that are not finite are added one by one, for shown entries
// only. On a GPU, where looking at the values would make the host wait, a result to which a shown value that is not
// finite contributes is NaN.
at::Tensor guarded_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& shown) {
  const at::Tensor finite = b.isfinite();
  if (!b.is_cpu()) {
    const at::Tensor bad = shown.to(a.scalar_type()).matmul(finite.logical_not().to(a.scalar_type())).gt(0);
    return a.matmul(b.masked_fill(finite.logical_not(), 0)).masked_fill_(bad, std::numeric_limits<double>::quiet_NaN());
  }
  if (finite.all().item<bool>()) return a.matmul(b);
  at::Tensor product = a.matmul(at::where(finite, b, at::zeros({}, b.options())));
  for (int64_t j = 0; j < b.size(-2); ++j) {
    const at::Tensor bad = at::where(finite.select(-2, j), at::zeros({}, b.options()), b.select(-2, j)).unsqueeze(-2);
    if (!bad.ne(0).any().item<bool>()) continue;
    const at::Tensor term = a.select(-1, j).unsqueeze(-1) * bad;
    const at::Tensor counts = shown.select(-1, j).unsqueeze(-1).logical_and(bad.ne(0));
    product = product + at::where(counts, term, at::zeros({}, b.options()));
  }
  return product;
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& mask, double scale, double softcap) {
  at::Tensor s = q.matmul(k.transpose(-2, -1)) * (softcap > 0 ? scale / softcap : scale);
  if (softcap > 0) s.tanh_().mul_(softcap);
  return mask.defined() ? s.masked_fill(mask.logical_not(), -kInfinity) : s;
}

at::Tensor shown_pairs(const at::Tensor& mask, const at::Tensor& like) {
  return mask.defined() ? mask : at::ones({like.size(-2), like.size(-1)}, like.options().dtype(at::kBool));
}

}  // namespace

DenseForward dense_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
                           const at::Tensor& factors, double scale, double softcap) {
  const at::Tensor s = scores(q, for_query_heads(k, q.size(1)), mask, scale, softcap);
  at::Tensor lse = at::logsumexp(s, {-1});
  const at::Tensor shift = lse.masked_fill(lse.eq(-kInfinity), 0).unsqueeze(-1);
  at::Tensor p = (s - shift).exp();
  at::Tensor shown = shown_pairs(mask, p);
  if (factors.defined()) {
    p = p * factors;
    shown = shown.logical_and(factors.ne(0));
  }
  return {guarded_product(p, for_query_heads(v, q.size(1)), shown), lse};
}

DenseBackward dense_backward(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& out, const at::Tensor& lse, const at::Tensor& mask,
                             const at::Tensor& factors, double scale, double softcap) {
  const at::Tensor kh = for_query_heads(k, q.size(1)), vh = for_query_heads(v, q.size(1));
  const at::Tensor s = scores(q, kh, mask, scale, softcap);
  // Scores are rounded as lse was. Huge ones would otherwise differ from it by more than any exponent.
  const at::Tensor shift = lse.masked_fill(lse.eq(-kInfinity), kInfinity).unsqueeze(-1);
  at::Tensor p = (s.to(lse.scalar_type()) - shift).to(s.scalar_type()).exp();
  if (mask.defined()) p = p.masked_fill(mask.logical_not(), 0);  // even if lse is NaN
  const at::Tensor delta = (dout * out).sum(-1, true);
  const at::Tensor shown = shown_pairs(mask, p);
  at::Tensor dp = dout.matmul(vh.transpose(-2, -1)), counted = p, kept = shown;
  if (factors.defined()) {
    kept = shown.logical_and(factors.ne(0));
    dp = (dp * factors).masked_fill(kept.logical_not(), 0);
    counted = p * factors;
  }
  at::Tensor ds = p * (dp - delta);
  if (softcap > 0) {
    const at::Tensor tanh = s / softcap;
    ds.mul_(tanh.square_().neg_().add_(1));  // NaN for hidden pairs, which become 0
  }
  if (mask.defined()) ds = ds.masked_fill(mask.logical_not(), 0);
  return {guarded_product(ds, kh, shown) * scale,
          sum_to_kv_heads(guarded_product(ds.transpose(-2, -1), q, shown.transpose(-2, -1)) * scale, k.size(1)),
          sum_to_kv_heads(guarded_product(counted.transpose(-2, -1), dout, kept.transpose(-2, -1)), v.size(1))};
}

}  // namespace annulus
