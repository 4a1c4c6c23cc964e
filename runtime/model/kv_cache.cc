// See kv_cache.h.
#include "runtime/model/kv_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "attention/execution/select_blocks.h"
#include "comm/threads/threads.h"

namespace annulus {
namespace {

bool all_heads(const Slice& s, int64_t heads) { return s.heads == Span{0, 1, heads}; }

bool selects(const PatternSpec& spec) {
  return spec.kind == PatternSpec::Kind::kBlocks && spec.blocks.map == BlocksSpec::Map::kAdaptive;
}

// The part of a pattern on which a selection depends. The rest may not fit a sequence that is shorter than the context.
PatternSpec selection_of(const PatternSpec& spec) {
  PatternSpec bare;
  bare.causal = spec.causal;
  if (selects(spec)) {
    bare.kind = spec.kind;
    bare.blocks = spec.blocks;
  } else if (spec.kind == PatternSpec::Kind::kUnion) {
    bare.kind = spec.kind;
    for (const PatternSpec& member : spec.members) bare.members.push_back(selection_of(member));
  }
  return bare;
}

// The spec with its adaptive maps as they were selected for the text so far, enlarged to a whole context. Blocks of
// queries before `first` are left empty.
PatternSpec with_selected(PatternSpec spec, const PatternSpec& selected, int64_t first, int64_t context) {
  for (size_t i = 0; i < spec.members.size(); ++i) {
    spec.members[i] = with_selected(std::move(spec.members[i]), selected.members[i], first, context);
  }
  if (!selects(spec)) return spec;
  const BlockMap& from = *selected.blocks.given;
  BlockMap map{.block = from.block,
               .batch = from.batch,
               .heads = from.heads,
               .query_blocks = ceil_div(context, from.block),
               .key_blocks = ceil_div(context, from.block),
               .offsets = {0},
               .runs = {}};
  for (int64_t row = 0; row < from.batch * from.heads; ++row) {
    for (int64_t i = 0; i < map.query_blocks; ++i) {
      if (i >= first / from.block && i < from.query_blocks) {
        const auto at = static_cast<size_t>(row * from.query_blocks + i);
        map.runs.insert(map.runs.end(), from.runs.begin() + from.offsets[at], from.runs.begin() + from.offsets[at + 1]);
      }
      map.offsets.push_back(static_cast<int64_t>(map.runs.size()));
    }
  }
  spec.blocks = given_map(std::make_shared<const BlockMap>(std::move(map)));
  return spec;
}

}  // namespace

at::Tensor pattern_bias(const Pattern& pattern, int64_t first, int64_t n, int64_t keys, at::ScalarType type,
                        bool* empty_rows) {
  const bool alike = std::all_of(pattern.slices.begin(), pattern.slices.end(),
                                 [&](const Slice& s) { return all_heads(s, pattern.shape.heads); });
  const int64_t heads = alike ? 1 : pattern.shape.heads;
  at::Tensor count = at::zeros({heads, n, keys}, at::TensorOptions(at::kDouble));
  double* p = count.data_ptr<double>();
  for (const Slice& s : pattern.slices) {
    if (!s.batch.contains(0)) continue;
    const Span queries = s.queries.clip(first, first + n - 1);
    for (int64_t h = 0; h < heads && !queries.empty(); ++h) {
      if (!alike && !s.heads.contains(h)) continue;
      for (int64_t i = 0; i < queries.count; ++i) {
        const int64_t query = queries.at(i);
        const Span seen = s.keys.clip(query + s.band.lo, std::min(query + s.band.hi, keys - 1));
        double* row = p + (h * n + query - first) * keys;
        for (int64_t j = 0; j < seen.count; ++j) row[seen.at(j)] += 1;
      }
    }
  }
  *empty_rows = n > 0 && (keys == 0 || count.amax(-1).eq(0).any().item<bool>());
  return count.to(type).log_();
}

KvCache::KvCache(const ModelShape& s, const at::TensorOptions& options, const std::vector<PatternSpec>& patterns,
                 int64_t context)
    : shape_(s), context_(context), self_(make_self_communicator()) {
  for (const PatternSpec& pattern : patterns) {
    const auto same =
        std::find_if(kinds_.begin(), kinds_.end(), [&](const LayerKind& kind) { return kind.spec == pattern; });
    kind_of_layer_.push_back(static_cast<size_t>(same - kinds_.begin()));
    if (same != kinds_.end()) continue;
    LayerKind kind{.spec = pattern, .adaptive = is_adaptive(pattern), .whole = {}, .bias = {}};
    kind.divisor = static_cast<double>(output_divisor(pattern));
    kinds_.push_back(std::move(kind));
  }
  kind_of_layer_.resize(static_cast<size_t>(s.layers), kind_of_layer_.at(0));
  for (LayerKind& kind : kinds_) {
    if (!kind.adaptive) kind.whole = make_pattern(kind.spec, shape(context));
  }
  for (int64_t i = 0; i < s.layers; ++i) {
    keys_.push_back(at::empty({s.kv_heads, context, s.head_dim()}, options));
    values_.push_back(at::empty({s.kv_heads, context, s.head_dim()}, options));
    const bool adaptive = kinds_[kind_of_layer_[static_cast<size_t>(i)]].adaptive;
    queries_.push_back(adaptive ? at::empty({context, s.heads, s.head_dim()}, options) : at::Tensor());
  }
}

AttentionShape KvCache::shape(int64_t length) const {
  const ModelShape& s = shape_;
  return {.batch = 1, .heads = s.heads, .kv_heads = s.kv_heads, .q_len = length, .k_len = length, .query_offset = 0};
}

void KvCache::begin(int64_t n) {
  for (LayerKind& kind : kinds_) {
    if (!kind.adaptive) kind.bias = bias_of(kind.whole, n);
  }
}

KvCache::Bias KvCache::bias_of(const Pattern& pattern, int64_t n) const {
  Bias bias;
  bias.values =
      pattern_bias(pattern, length_, n, length_ + n, keys_[0].scalar_type(), &bias.empty_rows).to(keys_[0].device());
  return bias;
}

// The pattern of the n queries that follow the cache. Adaptive maps are selected from all queries and keys so far.
Pattern KvCache::select(const PatternSpec& spec, int64_t layer, int64_t n) const {
  const auto i = static_cast<size_t>(layer);
  const int64_t end = length_ + n;
  PlanRequest request{.shape = shape(end), .pattern = selection_of(spec), .uneven_lengths = {}};
  request = select_blocks(request, queries_[i].narrow(0, 0, end).unsqueeze(0),
                          keys_[i].narrow(1, 0, end).transpose(0, 1).unsqueeze(0), *self_,
                          "sample, layer " + std::to_string(layer));
  return make_pattern(with_selected(spec, request.pattern, length_, context_), shape(context_));
}

at::Tensor KvCache::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
  const ModelShape& s = shape_;
  const int64_t n = q.size(1);
  const int64_t before = length_;
  const int64_t d = s.head_dim();
  const int64_t group = s.heads / s.kv_heads;
  keys_[layer].narrow(1, before, n).copy_(k[0].transpose(0, 1));
  values_[layer].narrow(1, before, n).copy_(v[0].transpose(0, 1));
  const LayerKind& kind = kinds_[kind_of_layer_[static_cast<size_t>(layer)]];
  Bias bias = kind.bias;
  if (kind.adaptive) {
    queries_[layer].narrow(0, before, n).copy_(q[0]);
    bias = bias_of(select(kind.spec, layer, n), n);
  }
  const at::Tensor keys = keys_[layer].narrow(1, 0, before + n);
  const at::Tensor values = values_[layer].narrow(1, 0, before + n);
  // The query heads of one kv head lie side by side: [kv_heads, group * n, D].
  const at::Tensor queries = q[0].transpose(0, 1).reshape({s.kv_heads, group * n, d});
  at::Tensor scores = at::bmm(queries, keys.transpose(1, 2)) * (1 / std::sqrt(static_cast<double>(d)));
  scores = at::softmax(scores.view({s.heads, n, before + n}) + bias.values, -1);
  if (bias.empty_rows) scores = at::nan_to_num(scores);
  return at::bmm(scores.view({s.kv_heads, group * n, before + n}), values)
      .div_(kind.divisor)
      .view({s.heads, n, d})
      .transpose(0, 1)
      .contiguous()
      .unsqueeze(0);
}

}  // namespace annulus
