// See run_everywhere.h.
#include "tests/attention/execution/run_everywhere.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "comm/threads/threads.h"

namespace annulus::testing {
namespace {

void put_rows(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans, const at::Tensor& part) {
  int64_t row = 0;
  for (const Span& s : spans) {
    whole.slice(dim, s.begin, s.last() + 1, s.stride).copy_(part.slice(dim, row, row + s.count));
    row += s.count;
  }
}

}  // namespace

PlanRequest causal_zigzag(int ranks, int64_t length) {
  PlanRequest request;
  request.shape = {1, 2, 1, length, length, 0};
  request.pattern.causal = true;
  request.layout = LayoutKind::kZigzag;
  request.ranks = ranks;
  return request;
}

Inputs random_inputs(const AttentionShape& s, int64_t head_dim, at::ScalarType type, double magnitude) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  return {(at::randn({s.batch, s.q_len, s.heads, head_dim}, options) * magnitude).to(type),
          (at::randn({s.batch, s.k_len, s.kv_heads, head_dim}, options) * magnitude).to(type),
          at::randn({s.batch, s.k_len, s.kv_heads, head_dim}, options).to(type),
          at::randn({s.batch, s.q_len, s.heads, head_dim}, options).to(type)};
}

at::Tensor rows_of(const at::Tensor& whole, int64_t dim, const std::vector<Span>& spans) {
  std::vector<at::Tensor> parts = {whole.slice(dim, 0, 0)};
  for (const Span& s : spans) parts.push_back(whole.slice(dim, s.begin, s.last() + 1, s.stride));
  return at::cat(parts, dim);
}

RankResults run_everywhere(const PlanRequest& request, const Inputs& in, KernelKind kernel, std::optional<double> scale,
                           std::optional<bool> lending, const Dropout& dropout, const OracleSoftmax& softmax) {
  static std::atomic<bool> lent = false;
  const bool lends = lending.value_or(lent = !lent);
  RankResults run;
  const size_t n = static_cast<size_t>(request.ranks);
  run.forward.resize(n), run.backward.resize(n);
  const at::ScalarType lse_type = in.q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  run.result.out = at::full(in.q.sizes(), NAN, in.q.options());
  run.result.lse = at::full({in.q.size(0), in.q.size(2), in.q.size(1)}, NAN, in.q.options().dtype(lse_type));
  run.result.dq = at::full(in.q.sizes(), NAN, in.q.options());
  run.result.dk = at::full(in.k.sizes(), NAN, in.q.options());
  run.result.dv = at::full(in.k.sizes(), NAN, in.q.options());
  if (softmax.sinks.defined()) run.result.dsinks = at::zeros_like(softmax.sinks, at::kDouble);
  std::mutex mutex;
  run_ranks(request.ranks, [&](Communicator& comm) {
    comm.set_lending(lends);
    const size_t r = static_cast<size_t>(comm.rank());
    AttentionCall call;
    call.request = request;
    call.comm = &comm;
    call.kernel = kernel;
    call.scale = scale;
    call.dropout = dropout;
    call.softcap = softmax.softcap;
    call.sinks = softmax.sinks.defined();
    // Which rank has which rows does not depend on the pattern, and an adaptive one has no program before the call.
    const std::vector<Span> queries = query_layout(request).spans[r], keys = key_layout(request).spans[r];
    const at::Tensor q = rows_of(in.q, 1, queries), k = rows_of(in.k, 1, keys), v = rows_of(in.v, 1, keys);
    const AttentionOutput out = attention_forward(q, k, v, call, softmax.sinks, &run.forward[r]);
    const AttentionGradients grads = attention_backward(rows_of(in.dout, 1, queries), q, k, v, out, &run.backward[r]);
    const std::lock_guard lock(mutex);
    put_rows(run.result.out, 1, queries, out.out);
    put_rows(run.result.lse, 2, queries, out.lse);
    put_rows(run.result.dq, 1, queries, grads.dq);
    put_rows(run.result.dk, 1, keys, grads.dk);
    put_rows(run.result.dv, 1, keys, grads.dv);
    if (call.sinks) run.result.dsinks.add_(grads.dsinks);
  });
  return run;
}

OracleResult oracle_of(const PlanRequest& request, const Inputs& in, std::optional<double> scale,
                       const Dropout& dropout, const OracleSoftmax& softmax) {
  const double used = scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  return oracle(in.q, in.k, in.v, in.dout, used, count_of(request.pattern, request.shape, in.q, in.k),
                weight_of({dropout.rate, dropout.seed, dropout.step, dropout.layer, dropout.first_row}), softmax);
}

Expected expected_of(const PlanRequest& request, const Inputs& in, std::optional<double> scale,
                     const OracleSoftmax& softmax) {
  const AttentionShape& s = request.shape;
  const at::Tensor log_counts = at::empty({s.batch, s.heads, s.q_len, s.k_len}, at::kDouble);
  const Count count = count_of(request.pattern, s);
  double* next = log_counts.data_ptr<double>();
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t i = 0; i < s.q_len; ++i) {
        for (int64_t j = 0; j < s.k_len; ++j) *next++ = std::log(static_cast<double>(count(b, h, i, j)));
      }
    }
  }
  return expected_from(oracle_of(request, in, scale, {}, softmax), in.q, in.k, in.v, in.dout, log_counts,
                       scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3)))), softmax);
}

void expect_refused_everywhere(const std::function<void(Communicator&)>& body, ErrorKind kind,
                               const std::string& part) {
  std::mutex mutex;
  int refused = 0;
  run_ranks(3, [&](Communicator& comm) {
    try {
      body(comm);
      ADD_FAILURE() << "rank " << comm.rank() << " went on";
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      EXPECT_EQ(error.kind(), kind) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      ++refused;
    }
  });
  EXPECT_EQ(refused, 3);
}

}  // namespace annulus::testing
