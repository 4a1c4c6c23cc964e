// See lengths.h.
#include "tests/attention/kernels/lengths.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>

#include <cmath>
#include <functional>
#include <map>
#include <tuple>

#include "attention/execution/planned_call.h"
#include "attention/oracle/oracle.h"
#include "attention/tiles/tile_views.h"
#include "comm/threads/threads.h"
#include "tests/attention/kernels/plain_attention.h"
#include "tests/common/exactness.h"

namespace annulus::testing {
namespace {

struct Whole {
  at::Tensor q, k, v, dout;
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

// Puts the results of the heads together, which `compute` computes for the heads of one kv head at a time.
OracleResult of_all_heads(const LengthCase& c, const Whole& in, const at::Tensor& log_counts,
                          const std::function<OracleResult(const DenseAttention&)>& compute) {
  const int64_t group = c.heads / c.kv_heads;
  std::vector<at::Tensor> out, lse, dq, dk, dv;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    const auto of_queries = [&](const at::Tensor& t) { return t.narrow(2, h * group, group).transpose(1, 2); };
    const auto of_keys = [&](const at::Tensor& t) { return t.narrow(2, h, 1).transpose(1, 2); };
    const OracleResult r = compute({of_queries(in.q),
                                    of_keys(in.k),
                                    of_keys(in.v),
                                    of_queries(in.dout),
                                    log_counts,
                                    {},
                                    1 / std::sqrt(static_cast<double>(c.dim))});
    const auto back = [](const at::Tensor& t) { return t.transpose(1, 2); };
    out.push_back(back(r.out)), dq.push_back(back(r.dq)), lse.push_back(r.lse);
    dk.push_back(back(r.dk.sum(1, /*keepdim=*/true))), dv.push_back(back(r.dv.sum(1, /*keepdim=*/true)));
  }
  return {at::cat(out, 2), at::cat(lse, 1), at::cat(dq, 2), at::cat(dk, 2), at::cat(dv, 2)};
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

double unit_of(KernelKind kernel, at::Device device, at::ScalarType type) {
  if (type == at::kDouble) return unit_roundoff(at::kDouble);
  return device.is_cuda() && kernel == KernelKind::kEfficient ? 0x1p-21 : unit_roundoff(at::kFloat);
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
  const AttentionGradients grads = attention_backward(in.dout, in.q, in.k, in.v, forward);
  const at::Tensor log_counts = shown_pairs(c, device).to(at::kDouble).log();
  const auto in_dtype = [&](at::ScalarType computed, at::ScalarType rounded) {
    return of_all_heads(c, in, log_counts,
                        [&](const DenseAttention& heads) { return plain_attention(heads, computed, rounded); });
  };
  Expected want{in_dtype(at::kDouble, at::kDouble), {}, {}};
  if (type != at::kDouble) want.usual = in_dtype(at::kFloat, type);
  want.terms =
      of_all_heads(c, in, log_counts, [&](const DenseAttention& heads) { return terms_of(heads, want.scores); });
  const auto as_wanted =
      as_exact({forward.out, forward.lse, grads.dq, grads.dk, grads.dv}, want, type, unit_of(kernel, device, type));
  return as_wanted ? "" : c.text() + ": " + as_wanted.message();
}

}  // namespace annulus::testing
