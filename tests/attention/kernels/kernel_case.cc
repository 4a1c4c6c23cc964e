// See kernel_case.h.
#include "tests/attention/kernels/kernel_case.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>
#include <map>

#include "attention/oracle/oracle.h"
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

namespace {

// What one query head of one batch row sees.
struct Head {
  int64_t batch = 0, head = 0;
  DenseAttention in;
  std::vector<int64_t> keys, gradients;  // rows of the block's keys, and of their gradients
};

// Those whose keys the block holds.
std::vector<Head> heads_of(const Case& c) {
  const int64_t n = c.q.size(1), m = c.keys.k.size(1);
  std::vector<Head> heads;
  for (int64_t b = 0; b < c.q.size(0); ++b) {
    for (int64_t h = 0; h < c.q.size(2); ++h) {
      const int64_t kv = h / c.call.group;
      if (!c.keys.batch.contains(b) || !c.keys.heads.contains(kv)) continue;
      Head head{b, h, {}, {}, {}};
      const at::Tensor counts = at::zeros({n, m}, at::kDouble);
      double* const count = counts.data_ptr<double>();
      std::map<int64_t, int64_t> gradient_of;
      for (const Tile& t : c.tiles) {
        if (!t.batch.contains(b) || !t.heads.contains(h)) continue;
        for (int64_t j = 0; j < t.key_rows.count; ++j) {
          gradient_of[t.key_rows.at(j)] = t.grad_rows.at(j);
          for (int64_t i = 0; i < t.query_rows.count; ++i) {
            const int64_t query = t.query_positions.at(i), key = t.key_positions.at(j);
            if (!t.band.contains(query, key)) continue;
            const MaskPlane* const mask = c.call.mask_of(t);
            if (mask != nullptr && !mask->bits(query, key).shows(key)) continue;
            count[t.query_rows.at(i) * m + t.key_rows.at(j)] += 1;
          }
        }
      }
      for (const auto& [key, gradient] : gradient_of) head.keys.push_back(key), head.gradients.push_back(gradient);
      const int64_t kb = c.keys.batch.index_of(b), kh = c.keys.heads.index_of(kv);
      const auto of_keys = [&](const at::Tensor& t) { return t.select(0, kb).select(1, kh); };
      const auto of_queries = [&](const at::Tensor& t) { return t.select(0, b).select(1, h); };
      head.in = {of_queries(c.q), of_keys(c.keys.k), of_keys(c.keys.v), of_queries(c.dout), counts.log(), {},
                 c.call.scale,    c.call.softcap};
      if (c.call.dropout.rate > 0) {  // in these cases the positions are the rows
        const Dropout& d = c.call.dropout;
        const PairWeight weight = weight_of({d.rate, d.seed, d.step, d.layer, d.first_row});
        head.in.factors = at::zeros({n, m}, at::kDouble);
        double* const factor = head.in.factors.data_ptr<double>();
        for (int64_t x = 0; x < n * m; ++x) factor[x] = weight(b, h, x / m, x % m);
      }
      heads.push_back(head);
    }
  }
  return heads;
}

// Puts the results of all heads together, in dtype `type`.
OracleResult together(const Case& c, const std::vector<Head>& heads, at::ScalarType type,
                      const std::function<OracleResult(const DenseAttention&)>& compute) {
  const auto options = at::TensorOptions().dtype(type);
  const std::vector<int64_t> shape{c.grad_batch.count, c.grad_rows, c.grad_heads.count, c.q.size(3)};
  OracleResult r{at::zeros(c.q.sizes(), options),
                 at::full({c.q.size(0), c.q.size(2), c.q.size(1)}, -kInfinity, options),
                 at::zeros(c.q.sizes(), options), at::zeros(shape, options), at::zeros(shape, options)};
  for (const Head& of : heads) {
    const OracleResult head = compute(of.in);
    r.out.select(0, of.batch).select(1, of.head).copy_(head.out);
    r.lse.select(0, of.batch).select(0, of.head).copy_(head.lse);
    r.dq.select(0, of.batch).select(1, of.head).copy_(head.dq);
    const int64_t gb = c.grad_batch.index_of(of.batch), gh = c.grad_heads.index_of(of.head / c.call.group);
    const at::Tensor from = at::tensor(of.keys), to = at::tensor(of.gradients);
    r.dk.select(0, gb).select(1, gh).index_add_(0, to, head.dk.index_select(0, from));
    r.dv.select(0, gb).select(1, gh).index_add_(0, to, head.dv.index_select(0, from));
  }
  return r;
}

}  // namespace

Expected by_definition(const Case& c) {
  const std::vector<Head> heads = heads_of(c);
  const auto in_dtype = [&](at::ScalarType type, at::ScalarType rounded) {
    return together(c, heads, type, [&](const DenseAttention& in) { return plain_attention(in, type, rounded); });
  };
  Expected want{in_dtype(at::kDouble, at::kDouble), {}, {}};
  const at::ScalarType type = c.q.scalar_type();
  if (type != at::kDouble) want.usual = in_dtype(at::kFloat, type);
  want.terms = together(c, heads, at::kDouble, [&](const DenseAttention& in) { return terms_of(in, want.scores); });
  return want;
}

::testing::AssertionResult right(const Result& got, const Case& c, const Expected& want, std::optional<double> unit) {
  return as_exact(got, want, c.q.scalar_type(), unit);
}

::testing::AssertionResult right(const Result& got, const Case& c) { return right(got, c, by_definition(c)); }

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
