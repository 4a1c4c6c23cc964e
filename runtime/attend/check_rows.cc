// See check_rows.h.
#include "runtime/attend/check_rows.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "attention/oracle/oracle.h"
#include "attention/oracle/rounding.h"
#include "attention/oracle/rows.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/splitmix64.h"
#include "common/text.h"

namespace annulus {
namespace {

constexpr OpLabel kCheckingRows{"attend, checking drawn rows"};

// The share of rows in the sentence about what a draw misses.
constexpr double kShownShare = 0.05;

// Random numbers that depend on nothing but the seed.
class DrawStream {
 public:
  DrawStream(int64_t seed, uint64_t number) : key_(splitmix64(splitmix64(static_cast<uint64_t>(seed)) ^ number)) {}
  int64_t below(int64_t end) {
    return static_cast<int64_t>(splitmix64(key_ + kSplitmix64Step * count_++) % static_cast<uint64_t>(end));
  }

 private:
  uint64_t key_;
  uint64_t count_ = 0;
};

// `n` different numbers below `end`, each set equally likely (Floyd; Bentley, Programming Pearls, CACM 1987).
std::set<int64_t> draw_numbers(DrawStream& stream, int64_t n, int64_t end) {
  std::set<int64_t> drawn;
  for (int64_t last = end - std::min(n, end); last < end; ++last) {
    const int64_t x = stream.below(last + 1);
    drawn.insert(drawn.contains(x) ? last : x);
  }
  return drawn;
}

struct DrawnRows {
  std::vector<OracleRow> rows;
  int64_t uniform = 0, all = 0;  // the first `uniform` rows are drawn from `all`; the others are at borders
};

DrawnRows draw_rows(DrawStream stream, int64_t wanted, int64_t batch, int64_t heads, const Layout& layout) {
  DrawnRows drawn;
  drawn.all = batch * heads * layout.length;
  const std::set<int64_t> numbers = draw_numbers(stream, wanted, drawn.all);
  drawn.uniform = static_cast<int64_t>(numbers.size());
  for (const int64_t x : numbers) {
    drawn.rows.push_back({x / layout.length / heads, x / layout.length % heads, x % layout.length});
  }
  if (drawn.uniform == drawn.all) return drawn;
  std::set<int64_t> distinct;
  for (const std::vector<Span>& spans : layout.spans) {
    for (const Span& span : spans) {
      if (!span.empty()) distinct.insert({span.begin, span.last()});
    }
  }
  const std::vector<int64_t> borders(distinct.begin(), distinct.end());
  for (const int64_t i : draw_numbers(stream, wanted, static_cast<int64_t>(borders.size()))) {
    const int64_t b = stream.below(batch), head = stream.below(heads), index = borders[static_cast<size_t>(i)];
    if (!numbers.contains((b * heads + head) * layout.length + index)) drawn.rows.push_back({b, head, index});
  }
  return drawn;
}

std::vector<Span> spans_of(const std::vector<OracleRow>& rows) {
  std::vector<Span> spans;
  for (const OracleRow& row : rows) spans.push_back({row.index, 1, 1});
  return spans;
}

// The rows, in fp64 [n, D], of a tensor [B, n, heads, D] whose positions are those of the rows.
at::Tensor picked(const at::Tensor& tensor, const std::vector<OracleRow>& rows) {
  at::Tensor result = at::zeros({static_cast<int64_t>(rows.size()), tensor.size(3)}, at::kDouble);
  for (size_t n = 0; n < rows.size(); ++n) {
    const auto i = static_cast<int64_t>(n);
    result.select(0, i).copy_(tensor.select(0, rows[n].batch).select(0, i).select(0, rows[n].head));
  }
  return result;
}

// Calls visit(spans, first row, positions) for parts of the spans of so few positions that their inputs take little
// memory.
template <typename Visit>
void for_each_part(const std::vector<Span>& spans, const AttendProblem& p, const Visit& visit) {
  constexpr int64_t kElements = int64_t{1} << 20;
  const int64_t step = std::max<int64_t>(
      1, kElements / std::max<int64_t>(1, p.shape.batch * p.shape.heads * std::max<int64_t>(1, p.head_dim)));
  int64_t row = 0;
  for (const Span& span : spans) {
    for (int64_t first = 0; first < span.count; first += step) {
      const Span part = span.sub(first, std::min(step, span.count - first));
      std::vector<int64_t> positions;
      for (int64_t i = 0; i < part.count; ++i) positions.push_back(part.at(i));
      visit(std::vector<Span>{part}, row, positions);
      row += part.count;
    }
  }
}

// What the ranks have reported for the rows: [n, width], on every rank. `read(local row, drawn row)` returns [width] of
// a row that this rank has.
template <typename Read>
at::Tensor reported(Communicator& world, const Layout& layout, const std::vector<OracleRow>& rows, int64_t width,
                    const Read& read) {
  at::Tensor values = at::zeros({static_cast<int64_t>(rows.size()), width}, at::kDouble);
  for (size_t n = 0; n < rows.size(); ++n) {
    int64_t before = 0;
    for (const Span& span : layout.spans[static_cast<size_t>(world.rank())]) {
      if (span.contains(rows[n].index)) {
        values.select(0, static_cast<int64_t>(n)).copy_(read(before + span.index_of(rows[n].index), rows[n]));
      }
      before += span.count;
    }
  }
  world.host().all_reduce(values, ReduceOp::kSum, kCheckingRows);  // all ranks but one have added 0
  return values;
}

// The smallest number of the dtype that is rounded relatively.
double least_normal(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-1022;
    case at::kHalf:
      return 0x1p-14;
    default:
      return 0x1p-126;  // bf16 as well
  }
}

// Compares results of rows and keeps the worst of each result.
class Comparison {
 public:
  Comparison(const AttendProblem& problem, std::string heads, std::string index)
      : problem_(problem), heads_(std::move(heads)), index_(std::move(index)) {}

  // got and want.value: [n, D], pairs and scores [n].
  RowsReport::Part compare(const std::string& name, const at::Tensor& got, const ExactRows& want,
                           const at::Tensor& pairs, const at::Tensor& scores,
                           const std::vector<OracleRow>& rows) const {
    RowsReport::Part part{name, 0, 0, ""};
    for (size_t n = 0; n < rows.size(); ++n) {
      const auto i = static_cast<int64_t>(n);
      const auto number = [&](const at::Tensor& t) { return t.const_data_ptr<double>()[t.stride(0) * i]; };
      const double bound = bound_of(problem_.dtype, number(scores), number(pairs));
      // A number below the least normal one has an absolute error, and so has each probability; those of a sum add up
      // like random steps.
      const double tiny = least_normal(problem_.dtype) * (1 + std::sqrt(number(pairs)) * number(want.factor));
      const at::Tensor w = want.value.select(0, i), g = got.select(0, i);
      const at::Tensor difference = (g - w).abs();
      double error = 0;
      if (!difference.isfinite().all().item<bool>()) {
        error = std::numeric_limits<double>::infinity();
      } else if (const auto most = difference.max().item<double>(); most > 0) {
        error = most / (number(want.terms) + tiny);
      }
      add(part, error, error / bound, rows[n]);
    }
    return part;
  }

  // got and want [n]. The error is absolute: that of a score, or of the logarithm of a sum.
  RowsReport::Part compare_lse(const at::Tensor& got, const at::Tensor& want, const at::Tensor& pairs,
                               const at::Tensor& scores, const std::vector<OracleRow>& rows) const {
    RowsReport::Part part{"lse", 0, 0, ""};
    const at::ScalarType dtype = problem_.dtype == at::kDouble ? at::kDouble : at::kFloat;
    for (size_t n = 0; n < rows.size(); ++n) {
      const auto number = [&](const at::Tensor& t) {
        return t.const_data_ptr<double>()[t.stride(0) * static_cast<int64_t>(n)];
      };
      const double g = number(got), w = number(want);
      double error = g == w ? 0 : std::abs(g - w);  // -inf - -inf is NaN
      if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
      add(part, error, error / bound_of(dtype, number(scores), number(pairs)), rows[n]);
    }
    return part;
  }

 private:
  double bound_of(at::ScalarType dtype, double scores, double pairs) const {
    const double bound = rounding_bound(dtype, scores, static_cast<int64_t>(pairs) + problem_.head_dim);
    require_telling_bound(scores, bound, problem_.dtype);
    return bound;
  }

  void add(RowsReport::Part& part, double error, double share, const OracleRow& row) const {
    part.error = std::max(part.error, error);
    if (!part.where.empty() && share <= part.share) return;
    part.share = share;
    part.where = "batch row " + std::to_string(row.batch) + ", " + heads_ + " " + std::to_string(row.head) + ", " +
                 index_ + " " + std::to_string(row.index);
  }

  const AttendProblem& problem_;
  std::string heads_, index_;
};

PairWeight factors_of(const Dropout& d) {
  return weight_of(OracleDropout{d.rate, d.seed, d.step, d.layer, d.first_row});
}

}  // namespace

std::string RowDraw::text() const { return "rows=" + std::to_string(rows) + ",seed=" + std::to_string(seed); }

RowDraw parse_row_draw(std::string_view text, std::string_view where) {
  RowDraw draw;
  bool has_rows = false, has_seed = false;
  for (const std::string& field : split(text, ',')) {
    const size_t equals = std::min(field.find('='), field.size());
    const std::string name = field.substr(0, equals);
    const std::string value = field.substr(std::min(equals + 1, field.size()));
    const bool is_rows = name == "rows", is_seed = name == "seed";
    const std::optional<int64_t> number = number_of_text<int64_t>(value);
    if (!(is_rows && !has_rows) && !(is_seed && !has_seed)) {
      throw Error(ErrorKind::kUsage, "attend",
                  std::string(where) +
                      ": expected nothing, to check all pairs, or rows=N or rows=N,seed=S, to check N " +
                      "drawn rows and keys, got \"" + std::string(text) + "\"");
    }
    if (!number || *number < (is_rows ? 1 : 0)) {
      throw Error(ErrorKind::kUsage, "attend",
                  std::string(where) + ", " + name + ": expected a whole number of at least " + (is_rows ? "1" : "0") +
                      ", got \"" + value + "\"");
    }
    (is_rows ? draw.rows : draw.seed) = *number;
    (is_rows ? has_rows : has_seed) = true;
  }
  if (!has_rows) {
    throw Error(ErrorKind::kUsage, "attend",
                std::string(where) +
                    ": a seed draws nothing without a number of rows; give rows=64,seed=" + std::to_string(draw.seed));
  }
  return draw;
}

double RowsReport::share() const {
  double most = 0;
  for (const Part& part : parts) most = std::max(most, part.share);
  return most;
}

bool RowsReport::passed() const { return selection_fault.empty() && share() <= 1; }

double RowsReport::missed(double share) const {
  if (rows == all_rows && keys == all_keys) return 0;
  return std::pow(1 - share, static_cast<double>(keys > 0 ? std::min(rows, keys) : rows));
}

std::string RowsReport::errors() const {
  std::string text;
  const Part* worst = nullptr;
  for (const Part& part : parts) {
    text += (text.empty() ? "" : ", ") + part.name + " " + scientific(part.error, 1);
    if (!worst || part.share > worst->share) worst = &part;
  }
  if (!selection_fault.empty()) {
    return text + "; blocks were selected that the definition does not select: " + selection_fault;
  }
  if (worst->share <= 1) return text + "; at most " + significant(100 * worst->share, 2) + " % of what rounding allows";
  return text + "; " + worst->name + " of " + worst->where + " is off by " + significant(worst->share, 3) +
         " times what rounding allows";
}

std::string RowsReport::text() const {
  const auto part = [](int64_t drawn, int64_t all, const char* noun) {
    return drawn == all ? "all " + with_commas(all, noun) : with_commas(drawn) + " of " + with_commas(all, noun);
  };
  const bool backward = all_keys > 0;
  std::string checked = part(rows, all_rows, "row") + " (out, lse" + (backward ? ", dq)" : ")");
  if (backward) checked += " and " + part(keys, all_keys, "key") + " (dk, dv)";
  if (missed(kShownShare) > 0) {
    checked += ", drawn with seed " + std::to_string(draw.seed) + ": a fault in " + significant(100 * kShownShare, 2) +
               " % of them is missed with a probability of at most " + significant(100 * missed(kShownShare), 2) + " %";
  }
  if (border_rows + border_keys > 0) {
    checked += "; besides " + with_commas(border_rows, "row") +
               (backward ? " and " + with_commas(border_keys, "key") : "") + " at the borders of ranks' parts";
  }
  return "check: " + errors() + "\nchecked: " + checked +
         "\nnot checked: " + (unchecked.empty() ? "nothing" : join(unchecked, "; "));
}

std::vector<Span> drawn_queries(const RowDraw& draw, const AttentionShape& s, const Layout& queries) {
  return spans_of(draw_rows({draw.seed, 0}, draw.rows, s.batch, s.heads, queries).rows);
}

RowsReport check_rows(Communicator& world, const AttendProblem& p, const AttendResults& mine, const RowDraw& draw) {
  const AttentionShape& s = p.shape;
  const int64_t D = p.head_dim, rank = world.rank();
  const bool backward = mine.dq.defined();
  const auto divisor = static_cast<double>(output_divisor(p.pattern));
  const DrawnRows queries = draw_rows({draw.seed, 0}, draw.rows, s.batch, s.heads, p.queries);
  DrawnRows keys;
  if (backward) keys = draw_rows({draw.seed, 1}, draw.rows, s.batch, s.kv_heads, p.keys);

  std::optional<QuerySums> of_queries;
  std::optional<KeySums> of_keys;
  const at::Tensor of_sinks = at::zeros({2, s.heads}, at::kDouble);  // their gradients, and the terms of these
  SelectionOfRows selection(p.asked, p.pattern, s, queries.rows, D);
  AttendResults got;
  together(world, kCheckingRows, [&] {
    const RowCounts counts(p.pattern, s);
    const PairWeight weight = factors_of(p.dropout);
    const RandomTensors at_rows = p.inputs(spans_of(queries.rows), spans_of(keys.rows));
    const at::Tensor q = picked(at_rows.q, queries.rows);
    of_queries.emplace(queries.rows, s, counts, weight, q,
                       backward ? picked(at_rows.dout, queries.rows) / divisor : at::zeros_like(q), p.scale, p.softmax);
    const std::vector<Span> share = {Span::range(rank * s.k_len / world.size(), (rank + 1) * s.k_len / world.size())};
    for_each_part(share, p, [&](const std::vector<Span>& part, int64_t, const std::vector<int64_t>& positions) {
      const RandomTensors in = p.inputs({}, part);
      of_queries->add(positions, in.k, in.v);
      selection.add_keys(positions, in.k);
    });
    for (size_t n = static_cast<size_t>(rank); n < queries.rows.size() && !selection.empty();
         n += static_cast<size_t>(world.size())) {
      selection.add_queries(n, [&](int64_t first, int64_t end) { return p.inputs({Span::range(first, end)}, {}).q; });
    }
    got = {mine.out.cpu(), mine.lse.cpu(), {}, {}, {}};
    if (!backward) return;
    got.dq = mine.dq.cpu(), got.dk = mine.dk.cpu(), got.dv = mine.dv.cpu();
    of_keys.emplace(keys.rows, s, counts, weight, picked(at_rows.k, keys.rows), picked(at_rows.v, keys.rows), p.scale,
                    divisor, p.softmax);
    const auto visit = [&](const std::vector<Span>& part, int64_t row, const std::vector<int64_t>& positions) {
      const RandomTensors in = p.inputs(part, {});
      const auto n = static_cast<int64_t>(positions.size());
      of_keys->add(positions, in.q, in.dout, got.out.narrow(1, row, n), got.lse.narrow(2, row, n));
      if (!p.softmax.sinks.defined()) return;
      const ExactRows part_of_sinks =
          sink_sums(p.softmax.sinks, in.dout, got.out.narrow(1, row, n), got.lse.narrow(2, row, n));
      of_sinks.select(0, 0).add_(part_of_sinks.value), of_sinks.select(0, 1).add_(part_of_sinks.terms);
    };
    for_each_part(p.queries.spans[static_cast<size_t>(rank)], p, visit);
  });

  Communicator& host = world.host();
  at::Tensor top = of_queries->top.clone();
  host.all_reduce(top, ReduceOp::kMax, kCheckingRows);
  of_queries->rescale_to(top);
  host.all_reduce(of_queries->most, ReduceOp::kMax, kCheckingRows);
  host.all_reduce(of_queries->sums, ReduceOp::kSum, kCheckingRows);
  const auto vector_of = [](const at::Tensor& t, int64_t local, const OracleRow& row) {
    return t.select(0, row.batch).select(0, local).select(0, row.head).to(at::kDouble);
  };
  const at::Tensor got_rows =
      reported(world, p.queries, queries.rows, 2 * D + 1, [&](int64_t local, const OracleRow& row) {
        const at::Tensor lse = got.lse.select(0, row.batch).select(0, row.head).narrow(0, local, 1).to(at::kDouble);
        return at::cat({vector_of(got.out, local, row),
                        backward ? vector_of(got.dq, local, row) : at::zeros({D}, at::kDouble), lse});
      });

  RowsReport report;
  report.draw = draw;
  if (!selection.empty()) {
    host.all_reduce(selection.sums, ReduceOp::kSum, kCheckingRows);
    report.selection_fault = selection.fault();
  }
  report.rows = queries.uniform, report.all_rows = queries.all;
  report.border_rows = static_cast<int64_t>(queries.rows.size()) - queries.uniform;
  const Comparison rows(p, "head", "query");
  const at::Tensor pairs = of_queries->pairs(), scores = of_queries->scores();
  ExactRows out = of_queries->out();
  out = {out.value / divisor, out.terms / divisor, out.factor / divisor};
  report.parts.push_back(rows.compare("out", got_rows.narrow(1, 0, D), out, pairs, scores, queries.rows));
  report.parts.push_back(rows.compare_lse(got_rows.select(1, 2 * D), of_queries->lse(), pairs, scores, queries.rows));
  if (backward) {
    report.parts.push_back(rows.compare("dq", got_rows.narrow(1, D, D), of_queries->dq(), pairs, scores, queries.rows));
    report.keys = keys.uniform, report.all_keys = keys.all;
    report.border_keys = static_cast<int64_t>(keys.rows.size()) - keys.uniform;
    host.all_reduce(of_keys->most, ReduceOp::kMax, kCheckingRows);
    host.all_reduce(of_keys->sums, ReduceOp::kSum, kCheckingRows);
    const at::Tensor got_keys = reported(world, p.keys, keys.rows, 2 * D, [&](int64_t local, const OracleRow& row) {
      return at::cat({vector_of(got.dk, local, row), vector_of(got.dv, local, row)});
    });
    const Comparison of(p, "kv head", "key");
    const at::Tensor n = of_keys->pairs(), sizes = of_keys->scores();
    report.parts.push_back(of.compare("dk", got_keys.narrow(1, 0, D), of_keys->dk(), n, sizes, keys.rows));
    report.parts.push_back(of.compare("dv", got_keys.narrow(1, D, D), of_keys->dv(), n, sizes, keys.rows));
    if (p.softmax.sinks.defined()) {
      at::Tensor sums = of_sinks.clone();
      host.all_reduce(sums, ReduceOp::kSum, kCheckingRows);
      at::Tensor got_sinks = mine.dsinks.to(at::kCPU, at::kDouble).clone();
      host.all_reduce(got_sinks, ReduceOp::kSum, kCheckingRows);
      // Each query's share of a softmax is wrong by as much as its scores, the largest of which is known for drawn
      // rows.
      std::vector<OracleRow> all_heads;
      for (int64_t h = 0; h < s.heads; ++h) all_heads.push_back({0, h, 0});
      const at::Tensor queries_of_head = at::full({s.heads}, static_cast<double>(s.batch * s.q_len), at::kDouble);
      const at::Tensor largest = at::full({s.heads}, 0.0, at::kDouble).add_(scores.max()).add_(sizes.max());
      const ExactRows want{sums.select(0, 0).unsqueeze(1), sums.select(0, 1), at::ones({s.heads}, at::kDouble)};
      report.parts.push_back(Comparison(p, "head", "query")
                                 .compare("dsinks", got_sinks.unsqueeze(1), want, queries_of_head, largest, all_heads));
    }
  }
  if (report.rows < report.all_rows)
    report.unchecked.push_back(backward ? "the other rows and keys" : "the other rows");
  if (backward) {
    report.unchecked.push_back(
        "dk and dv were computed from out and lse as reported" +
        std::string(report.rows < report.all_rows ? ", which are checked in the drawn rows alone" : ""));
  }
  return report;
}

}  // namespace annulus
