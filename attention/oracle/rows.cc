// Single rows and keys in plain loops; see rows.h.
#include "attention/oracle/rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace annulus {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();

// Columns of `most`.
enum { kScores, kFirstFactor, kSecondFactor, kMosts };

// Columns of the sums of queries. Each vector has D columns and is the sum over keys of exp(score - top) times
enum {
  kOut,          // w v
  kOutTerms,     // w |v|
  kDirect,       // w (g.v) k, times the slope of the score
  kDirectTerms,  // w (|g|.|v|) |k|
  kKeys,         // k, times the slope
  kKeysTerms,    // |k|
  kQueryVectors
};

// Those of keys.
enum { kDk, kDkTerms, kDv, kDvTerms, kKeyVectors };

at::Tensor plain(const at::Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }

// The D columns of one vector of the sums, which begin behind `scalars` columns.
at::Tensor columns(const at::Tensor& sums, int64_t scalars, int64_t vector, int64_t dim) {
  return sums.narrow(1, scalars + vector * dim, dim);
}

const double* element_of(const at::Tensor& tensor, int64_t b, int64_t row, int64_t head) {
  return tensor.const_data_ptr<double>() + ((b * tensor.size(1) + row) * tensor.size(2) + head) * tensor.size(3);
}

struct Product {
  double value = 0, magnitude = 0;
};

Product product(const double* x, const double* y, int64_t dim) {
  Product p;
  for (int64_t d = 0; d < dim; ++d) {
    p.value += x[d] * y[d];
    p.magnitude += std::abs(x[d] * y[d]);
  }
  return p;
}

double largest_of(const double* x, int64_t dim) {
  double most = 0;
  for (int64_t d = 0; d < dim; ++d) most = std::max(most, std::abs(x[d]));
  return most;
}

// A score with its soft cap, and its derivative by the score without.
struct Score {
  double value = 0, slope = 1;
};

Score capped(double score, double cap) {
  if (cap <= 0) return {score, 1};
  const double tanh = std::tanh(score / cap);
  return {cap * tanh, 1 - tanh * tanh};
}

at::Tensor largest_column(const at::Tensor& terms) { return terms.amax(at::IntArrayRef{1}); }

}  // namespace

QuerySums::QuerySums(std::vector<OracleRow> rows, const AttentionShape& shape, const RowCounts& counts,
                     PairWeight weight, at::Tensor q, at::Tensor g, double scale, const OracleSoftmax& softmax)
    : rows_(std::move(rows)),
      shape_(shape),
      weight_(std::move(weight)),
      q_(plain(q)),
      g_(plain(g)),
      scale_(scale),
      softcap_(softmax.softcap) {
  const auto n = static_cast<int64_t>(rows_.size());
  sinks_ = at::full({n}, kNone, q_.options());
  for (int64_t i = 0; softmax.sinks.defined() && i < n; ++i) {
    sinks_.select(0, i).copy_(softmax.sinks.select(0, rows_[static_cast<size_t>(i)].head));
  }
  top = at::full({n}, kNone, q_.options());
  most = at::zeros({n, kMosts}, q_.options());
  sums = at::zeros({n, 2 + kQueryVectors * q_.size(1)}, q_.options());
  for (const OracleRow& r : rows_) counts_.push_back(counts.of_query(r.batch, r.head, r.index));
}

void QuerySums::add(const std::vector<int64_t>& keys, const at::Tensor& k_in, const at::Tensor& v_in) {
  const at::Tensor k = plain(k_in), v = plain(v_in);
  const int64_t D = q_.size(1), group = shape_.heads / shape_.kv_heads, width = sums.size(1);
  for (size_t n = 0; n < rows_.size(); ++n) {
    const OracleRow& row = rows_[n];
    const auto first = static_cast<int64_t>(n);
    const double *const query = q_.const_data_ptr<double>() + first * D, *const g =
                                                                             g_.const_data_ptr<double>() + first * D;
    double& highest = top.mutable_data_ptr<double>()[n];
    double* const mosts = most.mutable_data_ptr<double>() + first * kMosts;
    double* const sum = sums.mutable_data_ptr<double>() + first * width;
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t m = (*counts_[n])(row.batch, row.head, row.index, keys[i]);
      if (m == 0) continue;
      const double* const key = element_of(k, row.batch, static_cast<int64_t>(i), row.head / group);
      const double* const value = element_of(v, row.batch, static_cast<int64_t>(i), row.head / group);
      const Product score_product = product(query, key, D), gradient = product(g, value, D);
      const double logarithm = std::log(static_cast<double>(m));
      const Score of_pair = capped(scale_ * score_product.value, softcap_);
      const double score = of_pair.value + logarithm, slope = of_pair.slope;
      if (score > highest) {
        const double factor = std::exp(highest - score);
        for (int64_t c = 1; c < width; ++c) sum[c] *= factor;
        highest = score;
      }
      const double e = std::exp(score - highest);
      const double w = weight_ ? weight_(row.batch, row.head, row.index, keys[i]) : 1;
      mosts[kScores] = std::max(mosts[kScores], std::abs(scale_) * score_product.magnitude + logarithm);
      mosts[kFirstFactor] = std::max(mosts[kFirstFactor], largest_of(value, D));
      mosts[kSecondFactor] = std::max(mosts[kSecondFactor], largest_of(key, D));
      sum[0] += 1;
      sum[1] += e;
      double* const vectors = sum + 2;
      for (int64_t d = 0; d < D; ++d) {
        vectors[kOut * D + d] += e * w * value[d];
        vectors[kOutTerms * D + d] += e * w * std::abs(value[d]);
        vectors[kDirect * D + d] += e * w * gradient.value * slope * key[d];
        vectors[kDirectTerms * D + d] += e * w * gradient.magnitude * std::abs(key[d]);
        vectors[kKeys * D + d] += e * slope * key[d];
        vectors[kKeysTerms * D + d] += e * std::abs(key[d]);
      }
    }
  }
}

void QuerySums::rescale_to(const at::Tensor& new_top) {
  // A row without keys here has only zeros, and -inf - -inf would be NaN.
  const at::Tensor factor = at::where(top.isfinite(), (top - new_top).exp(), at::zeros_like(top));
  sums.narrow(1, 1, sums.size(1) - 1).mul_(factor.unsqueeze(1));
  top = new_top.clone();
}

at::Tensor QuerySums::pairs() const { return sums.select(1, 0); }

at::Tensor QuerySums::lse() const {
  return at::logaddexp(at::where(pairs() > 0, top + sums.select(1, 1).log(), at::full_like(top, kNone)), sinks_);
}

at::Tensor QuerySums::totals() const {
  return at::where(pairs() > 0, sums.select(1, 1) + (sinks_ - top).exp(), at::ones_like(top)).unsqueeze(1);
}

at::Tensor QuerySums::scores() const {
  return at::maximum(most.select(1, kScores), lse().abs().masked_fill(lse() == kNone, 0));
}

ExactRows QuerySums::out() const {
  const int64_t D = q_.size(1);
  const at::Tensor total = totals();
  return {columns(sums, 2, kOut, D) / total, largest_column(columns(sums, 2, kOutTerms, D) / total),
          most.select(1, kFirstFactor)};
}

// dq is the sum over keys of p (w g.v - delta) slope scale k, where delta is g.out.
ExactRows QuerySums::dq() const {
  const int64_t D = q_.size(1);
  const auto vector = [&](int64_t number) { return columns(sums, 2, number, D) / totals(); };
  const at::Tensor delta = (g_ * vector(kOut)).sum({1}, /*keepdim=*/true);
  const at::Tensor delta_terms = (g_.abs() * vector(kOutTerms)).sum({1}, /*keepdim=*/true);
  const at::Tensor value = (vector(kDirect) - delta * vector(kKeys)) * scale_;
  const at::Tensor terms = (vector(kDirectTerms) + delta_terms * vector(kKeysTerms)) * std::abs(scale_);
  return {value, largest_column(terms), most.select(1, kSecondFactor) * std::max(1.0, std::abs(scale_))};
}

ExactRows sink_sums(const at::Tensor& sinks_in, const at::Tensor& dout_in, const at::Tensor& out_in,
                    const at::Tensor& lse_in) {
  const at::Tensor sinks = plain(sinks_in), dout = plain(dout_in), out = plain(out_in), lse = plain(lse_in);
  const int64_t batch = out.size(0), rows = out.size(1), heads = out.size(2), D = out.size(3);
  ExactRows sums{at::zeros({heads}, sinks.options()), at::zeros({heads}, sinks.options()),
                 at::zeros({heads}, sinks.options())};
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const double sink = sinks.const_data_ptr<double>()[h];
      double &value = sums.value.mutable_data_ptr<double>()[h], &terms = sums.terms.mutable_data_ptr<double>()[h];
      double& most = sums.factor.mutable_data_ptr<double>()[h];
      for (int64_t i = 0; i < rows && sink != kNone; ++i) {
        const double p = std::exp(sink - lse.const_data_ptr<double>()[(b * heads + h) * rows + i]);
        const Product delta = product(element_of(dout, b, i, h), element_of(out, b, i, h), D);
        value -= p * delta.value;
        terms += p * delta.magnitude;
        most = std::max(most, delta.magnitude);
      }
    }
  }
  return sums;
}

KeySums::KeySums(std::vector<OracleRow> rows, const AttentionShape& shape, const RowCounts& counts, PairWeight weight,
                 at::Tensor k, at::Tensor v, double scale, double divisor, const OracleSoftmax& softmax)
    : rows_(std::move(rows)),
      shape_(shape),
      weight_(std::move(weight)),
      k_(plain(k)),
      v_(plain(v)),
      scale_(scale),
      divisor_(divisor),
      softcap_(softmax.softcap) {
  const auto n = static_cast<int64_t>(rows_.size());
  most = at::zeros({n, kMosts}, k_.options());
  sums = at::zeros({n, 1 + kKeyVectors * k_.size(1)}, k_.options());
  for (const OracleRow& r : rows_) counts_.push_back(counts.of_key(r.batch, r.index));
}

void KeySums::add(const std::vector<int64_t>& queries, const at::Tensor& q_in, const at::Tensor& dout_in,
                  const at::Tensor& out_in, const at::Tensor& lse_in) {
  const at::Tensor q = plain(q_in), dout = plain(dout_in), out = plain(out_in), lse = plain(lse_in);
  const int64_t D = k_.size(1), group = shape_.heads / shape_.kv_heads, width = sums.size(1);
  const auto rows = static_cast<int64_t>(queries.size());
  for (size_t n = 0; n < rows_.size(); ++n) {
    const OracleRow& row = rows_[n];
    const auto first = static_cast<int64_t>(n);
    const double *const key = k_.const_data_ptr<double>() + first * D, *const value =
                                                                           v_.const_data_ptr<double>() + first * D;
    double* const mosts = most.mutable_data_ptr<double>() + first * kMosts;
    double* const sum = sums.mutable_data_ptr<double>() + first * width;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = row.head * group; h < (row.head + 1) * group; ++h) {
        const int64_t index = queries[static_cast<size_t>(i)];
        const int64_t m = (*counts_[n])(row.batch, h, index, row.index);
        if (m == 0) continue;
        const double *const query = element_of(q, row.batch, i, h), *const g = element_of(dout, row.batch, i, h);
        const double lse_of_row = lse.const_data_ptr<double>()[(row.batch * shape_.heads + h) * rows + i];
        const Product score_product = product(query, key, D), gradient = product(g, value, D);
        const Product delta = product(g, element_of(out, row.batch, i, h), D);
        const double logarithm = std::log(static_cast<double>(m));
        const Score score = capped(scale_ * score_product.value, softcap_);
        const double p = std::exp(score.value + logarithm - lse_of_row);
        const double w = weight_ ? weight_(row.batch, h, index, row.index) : 1;
        const double ds = p * (w * gradient.value / divisor_ - delta.value) * score.slope * scale_;
        const double ds_terms = p * (w * gradient.magnitude / divisor_ + delta.magnitude) * std::abs(scale_);
        mosts[kScores] =
            std::max({mosts[kScores], std::abs(scale_) * score_product.magnitude + logarithm, std::abs(lse_of_row)});
        mosts[kFirstFactor] = std::max(mosts[kFirstFactor], largest_of(query, D));
        mosts[kSecondFactor] = std::max(mosts[kSecondFactor], largest_of(g, D) / divisor_);
        sum[0] += 1;
        double* const vectors = sum + 1;
        for (int64_t d = 0; d < D; ++d) {
          vectors[kDk * D + d] += ds * query[d];
          vectors[kDkTerms * D + d] += ds_terms * std::abs(query[d]);
          vectors[kDv * D + d] += p * w * g[d] / divisor_;
          vectors[kDvTerms * D + d] += p * w * std::abs(g[d]) / divisor_;
        }
      }
    }
  }
}

at::Tensor KeySums::pairs() const { return sums.select(1, 0); }

at::Tensor KeySums::scores() const { return most.select(1, kScores); }

ExactRows KeySums::dk() const {
  const int64_t D = k_.size(1);
  return {columns(sums, 1, kDk, D), largest_column(columns(sums, 1, kDkTerms, D)),
          most.select(1, kFirstFactor) * std::max(1.0, std::abs(scale_))};
}

ExactRows KeySums::dv() const {
  const int64_t D = k_.size(1);
  return {columns(sums, 1, kDv, D), largest_column(columns(sums, 1, kDvTerms, D)), most.select(1, kSecondFactor)};
}

}  // namespace annulus
