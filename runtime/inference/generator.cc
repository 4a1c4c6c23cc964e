// See generator.h.
#include "runtime/inference/generator.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>

#include "attention/oracle/rounding.h"
#include "attention/plan/choice.h"
#include "attention/plan/time.h"
#include "common/error.h"
#include "common/splitmix64.h"
#include "memory/charge.h"
#include "runtime/inference/row_forward.h"
#include "runtime/model/decoder_layer.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

// The tokens that all ranks compute together in one forward. It bounds the memory that a rank takes for them.
constexpr int64_t kChunk = 256;

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::vector<PatternSpec> generation_patterns(const OpenedModel& opened, int64_t context,
                                             const OpenedModel::Note& note) {
  const ModelSection& model = opened.model();
  if (!opened.run()) {
    return model.pattern.each.empty() ? std::vector<PatternSpec>{model.pattern.all} : model.pattern.each;
  }
  AttentionShape shape{.batch = opened.run()->data.batch,
                       .heads = model.heads,
                       .kv_heads = model.kv_heads,
                       .q_len = context,
                       .k_len = context,
                       .query_offset = 0};
  std::vector<PatternSpec> patterns;
  for (size_t i = 0; i < std::max<size_t>(1, model.pattern.each.size()); ++i) {
    patterns.push_back(of_batch_rows(read_block_maps(model.pattern.of(static_cast<int64_t>(i)), shape), 0, 1));
  }
  shape.batch = 1;
  if (std::any_of(patterns.begin(), patterns.end(), [&](const PatternSpec& p) { return sees_later(p, shape); })) {
    note(
        "model.pattern lets a query see later keys, which do not exist yet while text is generated: this model was "
        "not trained to generate text");
  }
  return patterns;
}

LayoutKind prompt_layout(const std::optional<std::string>& named, const ModelShape& s,
                         const std::vector<PatternSpec>& patterns, int64_t context, const Computes& on,
                         const RankHosts& hosts) {
  const std::optional<LayoutKind> layout = parse_layout_or_auto(named.value_or("zigzag"), "--layout");
  if (layout || hosts.ranks() == 1) return layout.value_or(LayoutKind::kZigzag);
  LayerRequests layers;
  PlanRequest request{
      .shape =
          {.batch = 1, .heads = s.heads, .kv_heads = s.kv_heads, .q_len = context, .k_len = context, .query_offset = 0},
      .pattern = {},
      .schedule = ScheduleKind::kRing,
      .ranks = hosts.ranks(),
      .uneven_lengths = {},
      .keep_last = false,
      .terms = on_hosts(terms_of("", "--machine", on.gpu ? "cuda" : "cpu", s.head_dim(), on.element(),
                                 /*backward=*/false),
                        hosts)};
  for (const PatternSpec& pattern : patterns) {
    request.pattern = pattern;
    layers.of_layer.push_back(layers.distinct.size());
    layers.distinct.push_back(request);
  }
  return choose_layout(
             [&](LayoutKind one) {
               layers.set_layout(one);
               std::vector<RepeatedCall> calls;
               for (const PlanRequest& call : layers.distinct) calls.push_back({call, 1});
               return calls;
             },
             "all layers")
      .layout;
}

double generation_bytes(const ModelShape& s, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
                        const Computes& on, int ranks) {
  const int64_t rows = ceil_div(settings.positions, ranks) + 1;
  // Besides a layer's forward: attention's output in the accumulator's dtype and, of other ranks, two blocks of keys
  // and values, one that is computed with and one that arrives.
  int64_t layer = layer_forward_bytes(s, 1, rows, on) + rows * s.q_width() * on.wide();
  if (ranks > 1) layer += 4 * rows * s.kv_width() * on.element();
  // Keys and values as they are cached, in both dtypes.
  if (settings.stored && *settings.stored != on.dtype) {
    layer += 2 * rows * s.kv_width() * (on.element() + static_cast<int64_t>(c10::elementSize(*settings.stored)));
  }
  const auto norm = [&](int64_t n) {
    int64_t bytes = 0;
    for (const Charge& charge : norm_charges(n, s.dim, /*with_sum=*/false, on).charges) {
      if (charge.when == When::kForward || charge.when == When::kKept) bytes += charge.bytes;
    }
    return bytes;
  };
  // A norm that is composed of operators converts its rows to the accumulator's dtype.
  if (!on.single_passes() && on.wide() > on.element()) layer += norm(std::min(rows, tile_rows(s, on)));
  const int64_t last_norm = 2 * rows * s.dim * on.element() + norm(rows);
  // The rotary tables, and ids with their positions.
  const auto tables = static_cast<int64_t>(s.rotaries().distinct.size());
  const int64_t lasting = rows * (tables * s.head_dim() * on.wide() + 16);
  const int64_t logits = 32 * s.vocab;  // with their order and their sums
  const int64_t bytes = std::max({layer, last_norm, logits}) + lasting;
  return KvCache::bytes(s, patterns, settings, on.dtype, ranks) + static_cast<double>(bytes);
}

Generator::Generator(const Model& model, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
                     Communicator& comm)
    : model_(model),
      context_(settings.context),
      stored_(settings.stored.value_or(model.parameters().dtype())),
      comm_(comm),
      cache_(model.shape(), patterns, settings,
             at::TensorOptions(model.parameters().dtype()).device(model.parameters().device()), comm) {}

at::Tensor Generator::feed(const std::vector<int64_t>& tokens) {
  if (tokens.empty()) throw Error(ErrorKind::kInternal, "sample", "feed needs at least one token");
  std::vector<int64_t> next = tokens;
  if (cache_.length() + static_cast<int64_t>(next.size()) > context_) {
    // The text is too long: what is kept begins again at position 0. Half a context leaves room for as much again.
    std::vector<int64_t> all = tokens_;
    all.insert(all.end(), next.begin(), next.end());
    const auto keep = std::max<int64_t>(1, context_ / 2);
    next.assign(all.end() - std::min<int64_t>(keep, static_cast<int64_t>(all.size())), all.end());
    tokens_.clear();
    cache_.clear();
  }
  const auto count = static_cast<int64_t>(next.size()), step = cache_.divides(count) ? count : kChunk;
  at::Tensor logits;
  for (int64_t i = 0; i < count; i += step) logits = extend(next.data() + i, std::min(step, count - i));
  return logits;
}

at::Tensor Generator::extend(const int64_t* tokens, int64_t n) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor row = at::tensor(at::IntArrayRef(tokens, static_cast<size_t>(n)), at::kLong).unsqueeze(0);
  at::Tensor last;  // the hidden state of the last position
  if (cache_.divides(n)) {
    const LayerRequests layers = cache_.begin_divided(n);
    const at::Tensor hidden = RowForward(model_, comm_, KernelKind::kAuto)
                                  .hidden(layers, {.tokens = row}, "sample",
                                          [this](const Attend& attention, const at::Tensor& q, const at::Tensor& k,
                                                 const at::Tensor& v, int64_t layer, const at::Tensor& sinks) {
                                            return cache_.attend_divided(attention, q, k, v, layer, sinks);
                                          });
    last = hidden.narrow(0, hidden.size(0) - 1, 1).contiguous();
    // In every layout the last position is the last one of its rank.
    const Layout layout = row_layout(layers);
    const auto has_last = [&](const std::vector<Span>& spans) {
      return std::any_of(spans.begin(), spans.end(), [&](const Span& s) { return !s.empty() && s.last() == n - 1; });
    };
    const auto rank = std::find_if(layout.spans.begin(), layout.spans.end(), has_last) - layout.spans.begin();
    if (comm_.size() > 1) comm_.broadcast(last, static_cast<int>(rank), {"sample, the last position"});
  } else {
    cache_.begin(n);
    const int64_t before = cache_.length();
    last = model_.hidden(
        row.to(model_.parameters().device()), model_.rotary(at::arange(before, before + n, at::kLong)),
        [this](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer, const at::Tensor& sinks) {
          return cache_.attend(q, k, v, layer, sinks);
        },
        /*last_only=*/true);
  }
  cache_.end();
  tokens_.insert(tokens_.end(), tokens, tokens + n);
  return model_.wide_logits(last)[0].cpu();
}

double Generator::rounding(const at::Tensor& logits) const {
  const double computed = unit_roundoff(model_.parameters().dtype()), stored = unit_roundoff(stored_);
  const double of_layer = 16 * computed + (stored > computed ? 2 * stored : 0);
  return 2 * static_cast<double>(model_.shape().layers + 1) * of_layer * logits.abs().max().item<double>();
}

Picked pick(const at::Tensor& logits, int64_t limit, const Choice& choice, int64_t i, double rounding) {
  const at::Tensor values = logits.to(at::kCPU, at::kDouble).contiguous();
  const double* p = values.const_data_ptr<double>();
  std::vector<int64_t> order(static_cast<size_t>(std::min<int64_t>(limit, values.numel())));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return p[a] > p[b]; });
  // Each of two logits may be off, so these could have had the other order.
  const auto may_swap = [&](size_t a, size_t b) {
    return b < order.size() && p[order[a]] - p[order[b]] < 2 * rounding;
  };
  if (choice.temperature <= 0) return {order[0], may_swap(0, 1)};
  size_t count = order.size();
  if (choice.top_k > 0) count = std::min(count, static_cast<size_t>(choice.top_k));
  std::vector<double> sums;
  double sum = 0;
  for (size_t n = 0; n < count; ++n) {
    sums.push_back(sum += std::exp((p[order[n]] - p[order[0]]) / choice.temperature));
  }
  // Whether `share` of the sum is nearer to an end of a token's share F than logits that are off can move it. They
  // change log(F / (1 - F)) by at most e = 2 rounding / temperature, and so F by at most F (1 - F) (exp(e) - 1).
  const double factor = std::expm1(2 * rounding / choice.temperature);
  const auto near_an_end = [&](double share) {
    return std::any_of(sums.begin(), sums.end(), [&](double end) {
      const double f = end / sum;
      return std::abs(share - f) < f * (1 - f) * factor;
    });
  };
  bool near = false;
  if (choice.top_p < 1) {
    near = near_an_end(choice.top_p);
    const auto last = std::lower_bound(sums.begin(), sums.end(), choice.top_p * sum);
    sums.resize(std::min<size_t>(last - sums.begin() + 1, sums.size()));
    sum = sums.back();
  }
  const uint64_t random = splitmix64(splitmix64(choice.seed) + static_cast<uint64_t>(i) * kSplitmix64Step);
  const double u = static_cast<double>(random >> 11) * 0x1.0p-53;
  const auto at = std::upper_bound(sums.begin(), sums.end(), u * sum);
  const size_t drawn = std::min<size_t>(at - sums.begin(), sums.size() - 1);
  near = near || near_an_end(u) || may_swap(drawn, drawn + 1) || (drawn > 0 && may_swap(drawn - 1, drawn));
  return {order[drawn], near};
}

std::string Utf8Stream::push(unsigned char byte) {
  std::string out;
  const bool continues = (byte & 0xC0) == 0x80;
  if (!pending_.empty()) {
    // The second byte shows overlong forms, surrogates and values beyond U+10FFFF.
    const auto lead = static_cast<unsigned char>(pending_[0]);
    const bool second = pending_.size() == 1;
    const bool valid = continues && !(second && ((lead == 0xE0 && byte < 0xA0) || (lead == 0xED && byte > 0x9F) ||
                                                 (lead == 0xF0 && byte < 0x90) || (lead == 0xF4 && byte > 0x8F)));
    if (valid) {
      pending_ += static_cast<char>(byte);
      // C1 control characters (U+0080 to U+009F) are replaced, too.
      if (pending_.size() == need_) {
        out = lead == 0xC2 && byte < 0xA0 ? std::string(kReplacement) : pending_;
        pending_.clear();
      }
      return out;
    }
    out = kReplacement;
    pending_.clear();
  }
  if (byte < 0x80) {
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F;
    return out + (control ? std::string(kReplacement) : std::string(1, static_cast<char>(byte)));
  }
  need_ = byte >= 0xC2 && byte <= 0xDF ? 2 : (byte & 0xF0) == 0xE0 ? 3 : byte >= 0xF0 && byte <= 0xF4 ? 4 : 0;
  if (need_ == 0) return out + std::string(kReplacement);
  pending_ = static_cast<char>(byte);
  return out;
}

std::string Utf8Stream::finish() {
  const bool any = !pending_.empty();
  pending_.clear();
  return any ? std::string(kReplacement) : "";
}

}  // namespace annulus
