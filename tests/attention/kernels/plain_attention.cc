// See plain_attention.h.
#include "tests/attention/kernels/plain_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/matmul.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "tests/common/exactness.h"

namespace annulus::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Probabilities {
  at::Tensor lse, p, dropped;  // the last one with the factors of dropout
  at::Tensor slope;            // the derivative of a soft cap; undefined without
  at::Tensor of_sink;          // the sink's probability, [..., n]; undefined without
};

Probabilities probabilities(const DenseAttention& in, at::ScalarType type) {
  at::Tensor s = in.q.to(type).matmul(in.k.to(type).transpose(-2, -1)) * in.scale, slope, of_sink;
  if (in.softcap > 0) {
    const at::Tensor tanh = (s / in.softcap).tanh();
    slope = 1 - tanh * tanh;
    s = tanh * in.softcap;
  }
  s = s + in.log_counts.to(type);
  at::Tensor lse = s.logsumexp({-1});
  if (in.sinks.defined()) {
    lse = at::logaddexp(lse, in.sinks.to(type));
    of_sink = (in.sinks.to(type) - lse).exp().masked_fill(lse.eq(-kInfinity), 0);
  }
  const at::Tensor p = (s - lse.masked_fill(lse.eq(-kInfinity), 0).unsqueeze(-1)).exp();
  return {lse, p, in.factors.defined() ? p * in.factors.to(type) : p, slope, of_sink};
}

}  // namespace

OracleResult plain_attention(const DenseAttention& in, at::ScalarType type, at::ScalarType rounded) {
  const auto round = [&](const at::Tensor& t) { return t.to(rounded).to(type); };
  const at::Tensor q = in.q.to(type), k = in.k.to(type), v = in.v.to(type), dout = in.dout.to(type);
  const auto [lse, p, dropped, slope, of_sink] = probabilities(in, type);
  const at::Tensor out = round(dropped).matmul(v);
  const at::Tensor dp = dout.matmul(v.transpose(-2, -1));
  const at::Tensor delta = (dout * round(out)).sum(-1, /*keepdim=*/true);
  const at::Tensor of_scores = p * ((in.factors.defined() ? dp * in.factors.to(type) : dp) - delta);
  const at::Tensor ds = round(slope.defined() ? of_scores * slope : of_scores);
  return {out,
          lse,
          ds.matmul(k) * in.scale,
          ds.transpose(-2, -1).matmul(q) * in.scale,
          round(dropped).transpose(-2, -1).matmul(dout),
          of_sink.defined() ? (of_sink * delta.squeeze(-1)).sum(-1).neg() : at::Tensor()};
}

OracleResult terms_of(const DenseAttention& in, double& scores) {
  const auto magnitude = [](const at::Tensor& t) { return t.to(at::kDouble).abs(); };
  const at::Tensor q = magnitude(in.q), k = magnitude(in.k), v = magnitude(in.v), dout = magnitude(in.dout);
  const auto [lse, p, dropped, slope, of_sink] = probabilities(in, at::kDouble);
  const at::Tensor hidden = in.log_counts.eq(-kInfinity);
  double of_pairs = largest((q.matmul(k.transpose(-2, -1)) * in.scale).masked_fill(hidden, 0));
  // A capped score is off by the rounding of tanh as well, at most 8 unit roundoffs (tile_math.h).
  if (in.softcap > 0) of_pairs += 8 * std::min(in.softcap, of_pairs);
  scores = std::max(scores, of_pairs);
  // The rounding of lse, of the size of a sink, changes all probabilities.
  if (in.sinks.defined()) scores = std::max(scores, largest(in.sinks.masked_fill(in.sinks.eq(-kInfinity), 0)));
  const at::Tensor out = dropped.matmul(v);
  const at::Tensor dp = dout.matmul(v.transpose(-2, -1));
  const at::Tensor delta = (dout * out).sum(-1, true);
  const at::Tensor ds = p * ((in.factors.defined() ? dp * magnitude(in.factors) : dp) + delta);
  return {out,
          lse.abs() + 1,
          ds.matmul(k) * in.scale,
          ds.transpose(-2, -1).matmul(q) * in.scale,
          dropped.transpose(-2, -1).matmul(dout),
          of_sink.defined() ? (of_sink * delta.squeeze(-1)).sum(-1) : at::Tensor()};
}

Expected expected_from(const OracleResult& exact, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& dout, const at::Tensor& log_counts, double scale,
                       const OracleSoftmax& softmax) {
  const int64_t kv_heads = k.size(2), group = q.size(2) / kv_heads;
  const auto heads_first = [](const at::Tensor& t) { return t.transpose(1, 2); };
  const auto of_keys = [&](const at::Tensor& t) { return heads_first(t).repeat_interleave(group, 1); };
  DenseAttention dense{heads_first(q), of_keys(k), of_keys(v), heads_first(dout), log_counts, {}, scale};
  dense.softcap = softmax.softcap;
  if (softmax.sinks.defined()) dense.sinks = softmax.sinks.unsqueeze(1);
  const auto in_layout = [&](const OracleResult& r, at::ScalarType type) {
    const auto back = [&](const at::Tensor& t) { return heads_first(t).to(type); };
    const auto fold = [&](const at::Tensor& t) { return back(t.unflatten(1, {kv_heads, group}).sum(2)); };
    return OracleResult{back(r.out), r.lse,      back(r.dq),
                        fold(r.dk),  fold(r.dv), r.dsinks.defined() ? r.dsinks.sum(0) : at::Tensor()};
  };
  const at::ScalarType type = q.scalar_type();
  Expected want{exact, {}, {}};
  if (type != at::kDouble) want.usual = in_layout(plain_attention(dense, at::kFloat, type), type);
  want.terms = in_layout(terms_of(dense, want.scores), at::kDouble);
  return want;
}

double magnitude_of(const Expected& want) {
  const OracleResult& t = want.terms;
  return (1 + want.scores) * std::max({largest(t.out), largest(t.lse), largest(t.dq), largest(t.dk), largest(t.dv)});
}

::testing::AssertionResult as_exact(at::Tensor OracleResult::*result, const at::Tensor& got, const Expected& want,
                                    at::ScalarType type, std::optional<double> unit) {
  const at::ScalarType computed = type == at::kDouble ? at::kDouble : at::kFloat;
  const double of_sums = unit.value_or(unit_roundoff(computed)) / unit_roundoff(computed);
  const bool is_lse = result == &OracleResult::lse;
  const double terms = largest(want.terms.*result);
  const double of_scores = (is_lse ? terms + want.scores : terms * (1 + want.scores)) * of_sums;
  const at::Tensor& exact = want.*result;
  if (type == at::kDouble) return agrees(got, exact, of_scores);
  // The statistics are fp32 for all narrower inputs.
  const double of_rounding = is_lse || type == at::kFloat ? 0 : terms * unit_roundoff(type) / unit_roundoff(at::kFloat);
  return as_exact_as(got, want.usual.*result, exact, of_scores + of_rounding, unit_roundoff(at::kFloat));
}

::testing::AssertionResult as_exact(const OracleResult& got, const Expected& want, at::ScalarType type,
                                    std::optional<double> unit) {
  constexpr std::pair<const char*, at::Tensor OracleResult::*> kResults[] = {
      {"out", &OracleResult::out}, {"lse", &OracleResult::lse}, {"dq", &OracleResult::dq},
      {"dk", &OracleResult::dk},   {"dv", &OracleResult::dv},   {"dsinks", &OracleResult::dsinks}};
  ::testing::AssertionResult all = ::testing::AssertionSuccess();
  for (const auto& [name, result] : kResults) {
    if (!(want.*result).defined()) continue;  // there are no sinks
    const ::testing::AssertionResult one = as_exact(result, got.*result, want, type, unit);
    if (one) continue;
    if (all) all = ::testing::AssertionFailure();
    all << name << " is " << one.message() << "; ";
  }
  return all;
}

}  // namespace annulus::testing
