// See kernel_case.h.
#include "tests/attention/kernels/kernel_case.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/oracle/oracle.h"
#include "attention/tiles/dropout.h"
#include "attention/tiles/tile_views.h"

namespace annulus::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// While this exists, LibTorch fills new memory with NaN, so that results which nothing was written to are noticed. It
// does so in its deterministic mode, which a test may have chosen already.
class NewMemoryIsNan {
 public:
  NewMemoryIsNan() : chosen_(at::globalContext().deterministicAlgorithms()) {
    if (!chosen_) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  }
  ~NewMemoryIsNan() {
    if (!chosen_) at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  }
  NewMemoryIsNan(const NewMemoryIsNan&) = delete;
  NewMemoryIsNan& operator=(const NewMemoryIsNan&) = delete;

 private:
  const bool chosen_;
};

}  // namespace

Result run(const Case& c, const std::function<std::unique_ptr<Kernel>()>& make) {
  const NewMemoryIsNan nan;
  Result r;
  const Kernel::Poll poll = [] {};
  const auto forward = make();
  forward->begin_forward(c.q, c.call);
  forward->forward(c.keys, c.tiles, poll);
  forward->finish_forward(r.out, r.lse);
  const auto backward = make();
  backward->begin_backward(c.dout, c.q, r.out.to(c.q.scalar_type()), r.lse, c.call);
  const std::vector<int64_t> shape{c.grad_batch.count, c.grad_rows, c.grad_heads.count, c.q.size(3)};
  const auto options = c.q.options().dtype(accumulator_type(c.q.scalar_type()));
  r.dk = at::full(shape, NAN, options), r.dv = at::full(shape, NAN, options);
  constexpr bool kFresh = true;
  backward->backward(c.keys, {r.dk, r.dv, c.grad_batch, c.grad_heads, kFresh}, c.tiles, poll);
  r.dq = backward->finish_backward();
  r.peak = backward->peak_result_elements();
  return r;
}

Result run(const Case& c, KernelKind kind) {
  return run(c, [&] { return make_kernel(kind, c.q); });
}

Result by_definition(const Case& c) {
  const int64_t B = c.q.size(0), n = c.q.size(1), H = c.q.size(2), D = c.q.size(3), m = c.keys.k.size(1);
  const auto options = at::TensorOptions().dtype(at::kDouble);
  Result r;
  r.out = at::zeros(c.q.sizes(), options), r.dq = at::zeros(c.q.sizes(), options);
  r.lse = at::full({B, H, n}, -kInfinity, options);
  const std::vector<int64_t> shape{c.grad_batch.count, c.grad_rows, c.grad_heads.count, D};
  r.dk = at::zeros(shape, options), r.dv = at::zeros(shape, options);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      const int64_t kv = h / c.call.group;
      const at::Tensor counts = at::zeros({n, m}, options);
      at::Tensor factors = at::ones({n, m}, options);
      if (c.call.dropout.rate > 0) {  // in these cases the positions are the rows
        const Dropout& d = c.call.dropout;
        const PairWeight weight = weight_of({d.rate, d.seed, d.step, d.layer, d.first_row});
        for (int64_t x = 0; x < n * m; ++x) factors.data_ptr<double>()[x] = weight(b, h, x / m, x % m);
      }
      std::vector<int64_t> grad_row(static_cast<size_t>(m), -1);
      for (const Tile& t : c.tiles) {
        if (!t.batch.contains(b) || !t.heads.contains(h)) continue;
        for (int64_t j = 0; j < t.key_rows.count; ++j) {
          grad_row[static_cast<size_t>(t.key_rows.at(j))] = t.grad_rows.at(j);
          for (int64_t i = 0; i < t.query_rows.count; ++i) {
            if (!t.band.contains(t.query_positions.at(i), t.key_positions.at(j))) continue;
            counts.data_ptr<double>()[t.query_rows.at(i) * m + t.key_rows.at(j)] += 1;
          }
        }
      }
      if (!c.keys.batch.contains(b) || !c.keys.heads.contains(kv)) continue;
      const int64_t kb = c.keys.batch.index_of(b), kh = c.keys.heads.index_of(kv);
      const at::Tensor q = c.q.select(0, b).select(1, h).to(at::kDouble);
      const at::Tensor dout = c.dout.select(0, b).select(1, h).to(at::kDouble);
      const at::Tensor k = c.keys.k.select(0, kb).select(1, kh).to(at::kDouble);
      const at::Tensor v = c.keys.v.select(0, kb).select(1, kh).to(at::kDouble);
      const at::Tensor shown = counts.gt(0).any(1);
      const at::Tensor s = q.matmul(k.t()) * c.call.scale + counts.log();
      const at::Tensor lse = s.logsumexp({-1});
      const at::Tensor p = (s - lse.masked_fill(shown.logical_not(), 0).unsqueeze(1)).exp();
      const at::Tensor out = (p * factors).matmul(v);
      const at::Tensor ds = p * (factors * dout.matmul(v.t()) - (dout * out).sum(-1, true));
      r.out.select(0, b).select(1, h).copy_(out);
      r.lse.select(0, b).select(0, h).copy_(lse);
      r.dq.select(0, b).select(1, h).copy_(ds.matmul(k) * c.call.scale);
      const at::Tensor dk = ds.t().matmul(q) * c.call.scale, dv = (p * factors).t().matmul(dout);
      for (int64_t j = 0; j < m; ++j) {
        const int64_t g = grad_row[static_cast<size_t>(j)];
        if (g < 0) continue;
        const int64_t gb = c.grad_batch.index_of(b), gh = c.grad_heads.index_of(kv);
        r.dk.select(0, gb).select(1, gh)[g] += dk[j];
        r.dv.select(0, gb).select(1, gh)[g] += dv[j];
      }
    }
  }
  return r;
}

namespace {

double difference(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor g = got.to(at::kCPU, at::kDouble);
  // Where -inf is expected, neither NaN nor +inf is accepted.
  if (!g.isfinite().eq(want.isfinite()).all().item<bool>()) return kInfinity;
  if (!g.isfinite().logical_or(g.eq(want)).all().item<bool>()) return kInfinity;
  return (g - want).masked_fill(want.isfinite().logical_not(), 0).abs().max().item<double>();
}

}  // namespace

double worst(const Result& got, const Result& want) {
  return std::max({difference(got.out, want.out), difference(got.lse, want.lse), difference(got.dq, want.dq),
                   difference(got.dk, want.dk), difference(got.dv, want.dv)});
}

Case scattered(at::ScalarType type, bool one_head, int64_t head_dim) {
  const auto options = at::TensorOptions().dtype(type);
  const int64_t rows = 300;
  Case c;
  c.q = at::randn({3, 200, 4, head_dim}, options), c.dout = at::randn({3, 200, 4, head_dim}, options);
  const at::Tensor k = at::randn({3, rows, 2, head_dim}, options), v = at::randn({3, rows, 2, head_dim}, options);
  const auto part = [&](const at::Tensor& t) { return t.slice(0, 0, 3, 2).slice(2, one_head ? 1 : 0, 2); };
  c.keys = {part(k), part(v), {0, 2, 2}, one_head ? Span{1, 1, 1} : Span{0, 1, 2}};
  c.grad_batch = {0, 1, 3}, c.grad_heads = {0, 1, 2}, c.grad_rows = rows + 11;
  c.call.scale = 0.3, c.call.group = 2;
  const auto add = [&](Span heads, Span queries, Span keys, Band band = {}) {
    Tile t;
    t.batch = {0, 2, 2}, t.heads = heads;
    t.query_rows = t.query_positions = queries;
    t.key_rows = t.key_positions = t.grad_rows = keys;
    t.grad_rows.begin += 11;
    t.band = band;
    c.tiles.push_back(t);
  };
  const Span heads = one_head ? Span{2, 1, 2} : Span{0, 1, 4};
  for (const int64_t block : {0, 2, 3, 5}) {  // one row of blocks, with long and short runs
    add(heads, {0, 1, 64}, {block * 40, 1, 40});
    add(heads, {64, 1, 32}, {block * 16, 1, 16});
  }
  add(heads, {64, 1, 32}, {128, 1, 40}, {-Band::kUnbounded, 64});
  add({2, 1, 2}, {1, 3, 60}, {2, 4, 70}, {-40, 90});  // overlaps the others, with strides and a sloped band
  add({3, 1, 1}, {100, 1, 90}, {20, 1, 260}, {-30, 15});
  return c;
}

Case moved(Case c, at::Device device, at::ScalarType type) {
  for (at::Tensor* t : {&c.q, &c.dout, &c.keys.k, &c.keys.v}) *t = t->to(device, type);
  return c;
}

}  // namespace annulus::testing
