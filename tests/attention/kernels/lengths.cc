// See lengths.h.
#include "tests/attention/kernels/lengths.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <tuple>

#include "attention/execution/attention.h"
#include "attention/oracle/oracle.h"
#include "attention/tiles/tile_views.h"
#include "comm/threads/threads.h"

namespace annulus::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Whole {
  at::Tensor q, k, v, dout;
};

struct Results {
  at::Tensor out, lse, dq, dk, dv;
};

AttentionShape shape_of(const LengthCase& c) {
  return {c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.query_offset};
}

// Returns a bool mask [queries, keys] for all heads and batch rows. It is made once for all cases that differ only in
// heads and head size.
at::Tensor shown_pairs(const LengthCase& c, at::Device device) {
  static auto& known = *new std::map<std::tuple<int64_t, int64_t, std::string, int64_t>, at::Tensor>;
  at::Tensor& mask = known[{c.queries, c.keys, c.pattern, c.query_offset}];
  if (!mask.defined()) {
    const auto count = count_of(parse_pattern(c.pattern, "test"), shape_of(c));
    mask = at::empty({c.queries, c.keys}, at::kBool);
    bool* shown = mask.data_ptr<bool>();
    for (int64_t i = 0; i < c.queries; ++i) {
      for (int64_t j = 0; j < c.keys; ++j) *shown++ = count(0, 0, i, j) > 0;
    }
  }
  return mask.to(device);
}

// Computes densely in dtype `type`. What a kernel of a narrower dtype rounds (probabilities, results) is rounded to
// `rounded`.
Results dense(const LengthCase& c, const Whole& in, const at::Tensor& mask, at::ScalarType type,
              at::ScalarType rounded) {
  const int64_t group = c.heads / c.kv_heads;
  const double scale = 1 / std::sqrt(static_cast<double>(c.dim));
  const auto round = [&](const at::Tensor& t) { return t.to(rounded).to(type); };
  std::vector<at::Tensor> out, lse, dq, dk, dv;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    const auto of_queries = [&](const at::Tensor& t) { return t.narrow(2, h * group, group).transpose(1, 2).to(type); };
    const auto of_keys = [&](const at::Tensor& t) { return t.narrow(2, h, 1).transpose(1, 2).to(type); };
    const at::Tensor q = of_queries(in.q), dout = of_queries(in.dout), k = of_keys(in.k), v = of_keys(in.v);
    const at::Tensor s = (q.matmul(k.transpose(2, 3)) * scale).masked_fill(mask.logical_not(), -kInfinity);
    const at::Tensor l = s.logsumexp({-1});
    const at::Tensor p = (s - l.masked_fill(l.eq(-kInfinity), 0).unsqueeze(-1)).exp();
    const at::Tensor o = round(round(p).matmul(v));
    const at::Tensor ds = round(p * (dout.matmul(v.transpose(2, 3)) - (dout * o).sum(-1, true)));
    const auto back = [&](const at::Tensor& t) { return round(t).transpose(1, 2); };
    out.push_back(back(o));
    lse.push_back(l);
    dq.push_back(back(ds.matmul(k) * scale));
    dk.push_back(back((ds.transpose(2, 3).matmul(q) * scale).sum(1, true)));
    dv.push_back(back(round(p).transpose(2, 3).matmul(dout).sum(1, true)));
  }
  return {at::cat(out, 2), at::cat(lse, 1), at::cat(dq, 2), at::cat(dk, 2), at::cat(dv, 2)};
}

double largest(const at::Tensor& t) { return t.numel() == 0 ? 0 : t.abs().max().item<double>(); }

double distance(const at::Tensor& got, const at::Tensor& want) {
  const at::Tensor g = got.to(at::kDouble), w = want.to(at::kDouble);
  if (g.sizes() != w.sizes()) return kInfinity;
  // Where -inf is expected, neither NaN nor +inf is accepted.
  if (!g.isfinite().logical_or(g.eq(w)).all().item<bool>() || !g.isfinite().eq(w.isfinite()).all().item<bool>()) {
    return kInfinity;
  }
  return largest((g - w).masked_fill(w.isfinite().logical_not(), 0));
}

}  // namespace

std::string LengthCase::text() const {
  return "queries " + std::to_string(queries) + ", keys " + std::to_string(keys) + ", batch " + std::to_string(batch) +
         ", heads " + std::to_string(heads) + ":" + std::to_string(kv_heads) + ", head size " + std::to_string(dim) +
         ", offset " + std::to_string(query_offset) + ", " + pattern +
         (shift == 0 ? "" : ", scores about " + std::to_string(shift));
}

std::vector<LengthCase> length_cases(int64_t heads, int64_t kv_heads, int64_t dim, int64_t longest) {
  std::vector<int64_t> lengths{1, 63, 64, 65, 127, 128, 129, 704};
  if (longest > 704) lengths.push_back(longest);
  std::vector<LengthCase> cases;
  const auto add = [&](int64_t queries, int64_t keys, const char* pattern, int64_t offset = 0, int64_t batch = 1) {
    cases.push_back({queries, keys, heads, kv_heads, dim, pattern, offset, batch, /*shift=*/0});
  };
  for (const int64_t n : lengths) {
    add(n, n, "{ kind = \"causal\" }", 0, n < 256 ? 2 : 1);
    add(n, n, "{ kind = \"full\" }");
    add(n, n, "{ kind = \"window\", left = 63, right = 0 }");
    add(n, n, "{ kind = \"window\", left = 100, right = 50 }");
    add(n, n, "{ kind = \"causal\" }", -(n / 3 + 1));  // the first rows see no keys
  }
  for (const int64_t n : {64, 128, 704}) {
    add(n, n, "{ kind = \"full\" }");
    cases.back().shift = -120;
  }
  const int64_t most = lengths.back();
  add(65, 129, "{ kind = \"causal\" }");
  add(129, 65, "{ kind = \"causal\" }");
  add(129, 65, "{ kind = \"causal\" }", 65 - 129);
  add(1, most, "{ kind = \"causal\" }", most - 1);
  add(most, 1, "{ kind = \"causal\" }");
  add(most, 127, "{ kind = \"window\", left = 300, right = 0 }");  // rows without keys at the end
  add(127, most, "{ kind = \"window\", left = 10, right = 20 }", 300);
  return cases;
}

std::string check_length(const LengthCase& c, KernelKind kernel, at::Device device, at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  const auto random = [&](int64_t rows, int64_t heads) {
    return at::randn({c.batch, rows, heads, c.dim}, options).to(type);
  };
  const Whole in{random(c.queries, c.heads), random(c.keys, c.kv_heads), random(c.keys, c.kv_heads),
                 random(c.queries, c.heads)};
  if (c.shift != 0) {  // through the first elements of queries and keys, both of which every dtype can represent
    in.q.select(3, 0).fill_(1);
    in.k.select(3, 0).fill_(std::round(c.shift * std::sqrt(static_cast<double>(c.dim)) / 8) * 8);
  }
  const auto comm = make_self_communicator();
  AttentionCall call;
  call.request.shape = shape_of(c);
  call.request.pattern = parse_pattern(c.pattern, "test");
  call.comm = comm.get();
  call.kernel = kernel;
  const AttentionOutput forward = attention_forward(in.q, in.k, in.v, call);
  const AttentionGradients grads = attention_backward(in.dout, in.q, in.k, in.v, forward, call);
  const at::Tensor mask = shown_pairs(c, device);
  const Results want = dense(c, in, mask, at::kDouble, at::kDouble);
  const Results plain = dense(c, in, mask, accumulator_type(type), type);

  std::string wrong;
  const auto text = [](double number) {
    std::ostringstream words;
    words << number;
    return words.str();
  };
  // Gradients of q and k are differences of terms as large as those of v, so their errors are relative to that size.
  // In fp64, where the plain result is exact enough, the largest error seen on CPUs was 4e-15, and 1.8e-15 for lse
  // (three runs, two instruction sets, 704 positions). Devices are tested with longer sequences.
  // A shift makes scores so much larger, and their rounding with them; dq is that times the large elements of k.
  const double of_scores = 1 + std::abs(c.shift), of_keys = 1 + std::abs(c.shift) * std::sqrt(c.dim);
  const double of_double = of_scores * of_keys * (device.is_cpu() ? 1.5e-14 : 1e-12);
  const double lse_of_double = of_scores * (device.is_cpu() ? 6e-15 : 1e-12);
  const auto compare = [&](const char* name, const at::Tensor& got, const at::Tensor& right, const at::Tensor& ref,
                           double size) {
    const double unit = type == at::kDouble ? of_double : type == at::kFloat ? 2e-5 : type == at::kHalf ? 5e-4 : 4e-3;
    const double allowed = 3 * distance(ref, right) + unit * size;
    const double error = distance(got, right);
    if (error <= allowed && std::isfinite(allowed)) return;
    wrong +=
        std::string(wrong.empty() ? "" : "; ") + name + " is off by " + text(error) + ", allowed is " + text(allowed);
  };
  const double values = std::max({1e-3, largest(want.dv), largest(want.dq), largest(want.dk)});
  compare("out", forward.out, want.out, plain.out, std::max(1e-3, largest(want.out)));
  // Statistics are fp32 for all narrower inputs.
  const double lse_error = distance(forward.lse, want.lse), lse_allowed = type == at::kDouble ? lse_of_double : 1e-4;
  if (!(lse_error <= lse_allowed)) wrong += " lse is off by " + text(lse_error);
  compare("dq", grads.dq, want.dq, plain.dq, values);
  compare("dk", grads.dk, want.dk, plain.dk, values);
  compare("dv", grads.dv, want.dv, plain.dv, values);
  return wrong.empty() ? "" : c.text() + ": " + wrong;
}

}  // namespace annulus::testing
