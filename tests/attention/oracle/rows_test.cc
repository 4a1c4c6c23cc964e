// Tests of attention/oracle/rows.h: single rows and keys, computed part by part, are those of the oracle of all pairs.
#include "attention/oracle/rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <limits>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/testing/any_pattern.h"
#include "runtime/attend/random_input.h"
#include "tests/common/exactness.h"

namespace annulus::rows_test {
namespace {

constexpr double kScale = 0.3, kInfinity = std::numeric_limits<double>::infinity();

AttentionShape any_shape() {
  const int64_t kv_heads = *rc::gen::inRange<int64_t>(1, 3), q_len = *rc::gen::inRange<int64_t>(1, 70);
  const bool square = *rc::gen::arbitrary<bool>();
  return {*rc::gen::inRange<int64_t>(1, 3),
          kv_heads * *rc::gen::inRange<int64_t>(1, 3),
          kv_heads,
          q_len,
          square ? q_len : *rc::gen::inRange<int64_t>(1, 70),
          16 * *rc::gen::inRange<int64_t>(-1, 2)};
}

RandomTensors any_inputs(const AttentionShape& s) {
  return make_random(
      {s.batch, s.q_len, s.k_len, s.heads, s.kv_heads, 5, at::kDouble, *rc::gen::inRange<int64_t>(0, 1000)});
}

// All rows of a tensor [B, n, heads, D], as [B heads n, D], and their places.
at::Tensor all_rows(const at::Tensor& t) { return t.transpose(1, 2).reshape({-1, t.size(3)}); }

std::vector<OracleRow> places(int64_t batch, int64_t heads, int64_t length) {
  std::vector<OracleRow> rows;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < length; ++i) rows.push_back({b, h, i});
    }
  }
  return rows;
}

std::vector<int64_t> every_second(int64_t first, int64_t length) {
  std::vector<int64_t> positions;
  for (int64_t i = first; i < length; i += 2) positions.push_back(i);
  return positions;
}

void assert_agrees(const at::Tensor& got, const at::Tensor& want, double terms) {
  const ::testing::AssertionResult outcome = testing::agrees(got, want, terms);
  RC_LOG() << outcome.message();
  RC_ASSERT(static_cast<bool>(outcome));
}

void assert_row(const ExactRows& got, const at::Tensor& want) {
  assert_agrees(got.value, want, testing::largest(got.terms) + 1);
  // What is bounded by its terms is no larger than they are.
  RC_ASSERT((got.value.abs().amax(at::IntArrayRef{1}) <= got.terms * (1 + 1e-12) + 1e-300).all().item<bool>());
}

RC_GTEST_PROP(OracleRows, AreThoseOfAllPairs, ()) {
  const AttentionShape s = any_shape();
  const PatternSpec pattern = testing::any_pattern(s);
  RC_LOG() << pattern.text() << "\n";
  const RandomTensors in = any_inputs(s);
  const PairWeight weight = weight_of({*rc::gen::element(0.0, 0.3), 5, 1, 2, 3});
  const auto divisor = static_cast<double>(output_divisor(pattern));
  OracleSoftmax softmax{.softcap = *rc::gen::element(0.0, 0.7, 30.0)};
  if (*rc::gen::arbitrary<bool>()) {
    softmax.sinks = at::randn({s.heads}, at::kDouble);
    softmax.sinks[0].fill_(*rc::gen::element(-kInfinity, 0.5, 1e4));
  }
  OracleResult want = oracle(in.q, in.k, in.v, in.dout / divisor, kScale, count_of(pattern, s), weight, softmax);
  want.out.div_(divisor);
  const RowCounts counts(pattern, s);

  // Two parts of the keys are added to sums of their own, as on two ranks.
  std::vector<QuerySums> parts;
  for (const int64_t first : {0, 1}) {
    parts.emplace_back(places(s.batch, s.heads, s.q_len), s, counts, weight, all_rows(in.q),
                       all_rows(in.dout) / divisor, kScale, softmax);
    parts.back().add(every_second(first, s.k_len), in.k.slice(1, first, s.k_len, 2), in.v.slice(1, first, s.k_len, 2));
  }
  const at::Tensor top = at::maximum(parts[0].top, parts[1].top);
  for (QuerySums& part : parts) part.rescale_to(top);
  QuerySums& rows = parts[0];
  rows.most = at::maximum(rows.most, parts[1].most);
  rows.sums += parts[1].sums;
  ExactRows out = rows.out();
  out.value = out.value / divisor;
  assert_row(out, all_rows(want.out));
  assert_row(rows.dq(), all_rows(want.dq));
  assert_agrees(rows.lse(), want.lse.flatten(), testing::largest(rows.scores()) + 1);

  KeySums keys(places(s.batch, s.kv_heads, s.k_len), s, counts, weight, all_rows(in.k), all_rows(in.v), kScale, divisor,
               softmax);
  for (const int64_t first : {0, 1}) {
    const auto part = [&](const at::Tensor& t) { return t.slice(1, first, s.q_len, 2); };
    keys.add(every_second(first, s.q_len), part(in.q), part(in.dout), part(want.out),
             want.lse.slice(2, first, s.q_len, 2));
  }
  assert_row(keys.dk(), all_rows(want.dk));
  assert_row(keys.dv(), all_rows(want.dv));
  if (softmax.sinks.defined()) {
    const ExactRows sinks = sink_sums(softmax.sinks, in.dout, want.out, want.lse);
    assert_agrees(sinks.value, want.dsinks, testing::largest(sinks.terms) + 1);
    RC_ASSERT((sinks.value.abs() <= sinks.terms * (1 + 1e-12) + 1e-300).all().item<bool>());
  }
  RC_ASSERT(rows.pairs().sum().item<double>() == keys.pairs().sum().item<double>());
}

}  // namespace
}  // namespace annulus::rows_test
