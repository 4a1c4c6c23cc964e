// See attend_check.h.
#include "runtime/attend/attend_check.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention/oracle/oracle.h"
#include "attention/oracle/rounding.h"
#include "attention/oracle/rows.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/tensor_files/safetensors.h"

namespace annulus {
namespace {

// The most pairs times head size that the oracle is asked to compute.
constexpr double kMost = 8e9;

// If errors of this share of the largest value are allowed, the check is refused.
constexpr double kVague = 0.1;

double largest(const at::Tensor& tensor) { return tensor.numel() == 0 ? 0 : tensor.abs().max().item<double>(); }

// Returns the error relative to the largest expected value or `least`. It is infinite if infinities are in different
// places or there is a NaN.
double error_of(const at::Tensor& got, const at::Tensor& want, double least) {
  if (got.numel() == 0) return 0;
  const at::Tensor g = got.to(at::kDouble);
  const at::Tensor finite = want.isfinite();
  if (!g.eq(want).logical_or(finite.logical_and(g.isfinite())).all().item<bool>()) {
    return std::numeric_limits<double>::infinity();
  }
  const auto largest_finite = [&](const at::Tensor& t) { return largest(t.masked_fill(finite.logical_not(), 0)); };
  return largest_finite(g - want) / std::max(least, largest_finite(want));
}

// The position of a row of tensors that consist of the positions in `spans`.
int64_t position_at(const std::vector<Span>& spans, int64_t row) {
  for (const Span& span : spans) {
    if (row < span.count) return span.at(row);
    row -= span.count;
  }
  return row;
}

// Refuses a check that no result could fail, or that none could pass.
[[noreturn]] void refuse_vague(double scores, double bound, at::ScalarType dtype) {
  throw Error(ErrorKind::kUsage, "attend",
              "--check says nothing here: rounding scores as large as " + significant(scores, 3) + " in " +
                  std::string(safetensors_dtype(dtype)) + " allows errors of " + significant(bound, 3) +
                  ", and above " + significant(kVague, 1) +
                  " a check is meaningless; use a smaller --scale or magnitude" +
                  (dtype == at::kDouble ? "" : ", or dtype=f64"));
}

}  // namespace

void require_telling_bound(double scores, double bound, at::ScalarType dtype) {
  if (!(bound <= kVague)) refuse_vague(scores, bound, dtype);
}

void check_oracle_size(const AttentionShape& s, int64_t head_dim) {
  const double work = static_cast<double>(s.batch * s.heads) * static_cast<double>(s.q_len) *
                      static_cast<double>(s.k_len) * static_cast<double>(head_dim);
  if (work <= kMost) return;
  throw Error(ErrorKind::kUsage, "attend",
              "--check compares with plain loops over all pairs: batch x heads x queries x keys x head size is " +
                  significant(work, 3) + ", but may be at most " + significant(kMost, 3) +
                  "; check drawn rows (--check rows=64), or a smaller problem");
}

void require_finite(const RandomTensors& inputs, const std::string& where, const std::vector<Span>* queries,
                    const std::vector<Span>* keys) {
  const std::pair<const char*, const at::Tensor&> named[] = {
      {"q", inputs.q}, {"k", inputs.k}, {"v", inputs.v}, {"dout", inputs.dout}};
  for (const auto& [name, tensor] : named) {
    if (!tensor.defined() || tensor.isfinite().all().item<bool>()) continue;
    int64_t rest = tensor.isfinite().logical_not().flatten().to(at::kByte).argmax().item<int64_t>();  // the first
    const auto value = tensor.flatten()[rest].item<double>();
    std::vector<int64_t> place = tensor.sizes().vec();
    for (size_t i = place.size(); i-- > 0;) {
      const int64_t size = place[i];
      place[i] = rest % size;
      rest /= size;
    }
    const std::vector<Span>* const spans = name[0] == 'q' || name[0] == 'd' ? queries : keys;
    if (spans != nullptr) place[1] = position_at(*spans, place[1]);
    throw Error(ErrorKind::kInput, "attend",
                where + ", tensor \"" + name + "\": the element " + list_text(place) + " is " +
                    (std::isnan(value) ? "nan"
                     : value > 0       ? "inf"
                                       : "-inf") +
                    " in " + std::string(safetensors_dtype(tensor.scalar_type())) +
                    ", but --check only compares results of finite inputs; make it finite, or leave out --check");
  }
}

std::string check_results(const PatternSpec& pattern, const AttentionShape& shape, const RandomTensors& in,
                          const AttendResults& got, double scale, const Dropout& dropout,
                          const OracleSoftmax& softmax) {
  const bool backward = got.dq.defined();
  const auto divisor = static_cast<double>(output_divisor(pattern));
  const at::Tensor dout = backward ? in.dout.to(at::kDouble) / divisor : at::zeros_like(in.q, at::kDouble);
  OracleResult want =
      oracle(in.q, in.k, in.v, dout, scale, count_of(pattern, shape),
             weight_of({dropout.rate, dropout.seed, dropout.step, dropout.layer, dropout.first_row}), softmax);
  want.out.div_(divisor);
  const at::Tensor finite = want.lse.masked_fill(want.lse.isfinite().logical_not(), 0);
  const double scores = finite.numel() > 0 ? finite.abs().max().item<double>() : 0;
  const at::ScalarType dtype = in.q.scalar_type();
  const int64_t terms = shape.q_len * (shape.heads / shape.kv_heads) + shape.k_len + in.q.size(3);
  const double bound = rounding_bound(dtype, scores, terms);
  const double lse_bound = rounding_bound(dtype == at::kDouble ? at::kDouble : at::kFloat, scores, terms);
  // Scores that overflow fp64 give no finite lse, so they are bounded by the inputs here.
  const double most_scores = std::abs(scale) * largest(in.q) * largest(in.k) * static_cast<double>(in.q.size(3));
  if (!std::isfinite(most_scores)) refuse_vague(most_scores, most_scores, dtype);
  require_telling_bound(scores, std::max(bound, lse_bound), dtype);
  std::string text;
  bool good = true;
  const auto compare = [&](const char* name, const at::Tensor& g, const at::Tensor& w, double most, double least = 1) {
    const double error = error_of(g, w, std::max(1.0, least));
    good = good && error <= most;
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + scientific(error, 1);
  };
  compare("out", got.out, want.out, bound);
  compare("lse", got.lse, want.lse, lse_bound);
  if (backward) {
    // dq and dk are sums of keys and queries times differences of products of dout and v, and may cancel.
    const auto longest_row = [](const at::Tensor& t) {
      return t.numel() == 0 ? 0 : largest(t.to(at::kDouble).norm(2, -1));
    };
    const double products = std::max(1.0, std::abs(scale) * longest_row(in.dout) * longest_row(in.v));
    compare("dq", got.dq, want.dq, bound, largest(in.k) * products);
    compare("dk", got.dk, want.dk, bound, largest(in.q) * products);
    compare("dv", got.dv, want.dv, bound);
    if (got.dsinks.defined()) {
      const ExactRows sums = sink_sums(softmax.sinks, in.dout, want.out, want.lse);
      compare("dsinks", got.dsinks, want.dsinks, bound, largest(sums.terms));
    }
  }
  text += "; allowed " + scientific(bound, 1) + ", lse " + scientific(lse_bound, 1);
  if (!good) {
    throw Error(ErrorKind::kInternal, "attend",
                "the results differ from dense fp64 attention: errors " + text + "; please report this command");
  }
  return text;
}

void check_selection(const PatternSpec& asked, const PatternSpec& used, const AttentionShape& shape,
                     const RandomTensors& in) {
  const std::string fault = selection_fault(asked, used, shape, in.q, in.k);
  if (fault.empty()) return;
  throw Error(ErrorKind::kInternal, "attend",
              "blocks were selected that the definition does not select: " + fault + "; please report this command");
}

}  // namespace annulus
