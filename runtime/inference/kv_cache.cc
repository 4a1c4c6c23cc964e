// See kv_cache.h.
#include "runtime/inference/kv_cache.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "attention/execution/select_blocks.h"
#include "attention/execution/sinks.h"
#include "attention/kernels/choose_kernel.h"
#include "attention/tiles/tile_views.h"
#include "common/error.h"
#include "common/text.h"

namespace annulus {
namespace {

// Keys that are converted at a time to the dtype that is computed in.
constexpr int64_t kConvertedKeys = 1024;

bool selects(const PatternSpec& spec) {
  return spec.kind == PatternSpec::Kind::kBlocks && spec.blocks.map == BlocksSpec::Map::kAdaptive;
}

// Whether the pattern of a text that goes on is, for the text so far, the same pattern: then a prompt's plan is not
// written slice by slice.
bool same_for_any_length(const PatternSpec& spec) {
  if (!spec.documents.empty() || !spec.kept_keys.empty()) return false;
  if (spec.kind == PatternSpec::Kind::kUnion) {
    return std::ranges::all_of(spec.members, same_for_any_length);
  }
  return spec.kind == PatternSpec::Kind::kFull || spec.kind == PatternSpec::Kind::kWindow;
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

// The most positions of a rank. A layout gives a rank two chunks of 2 P at most, and each later position goes to the
// rank with the fewest.
int64_t most_of_rank(int64_t positions, int ranks) {
  return ranks == 1 ? positions : std::min(positions, ceil_div(positions, ranks) + 1);
}

// Members first, ..., first + count - 1 of the concatenated spans.
std::vector<Span> part_of(const std::vector<Span>& spans, int64_t first, int64_t count) {
  std::vector<Span> part;
  for (const Span& span : spans) {
    const int64_t begin = std::clamp<int64_t>(first, 0, span.count);
    const int64_t end = std::clamp<int64_t>(first + count, begin, span.count);
    if (begin < end) part.push_back(span.sub(begin, end - begin));
    first -= span.count;
  }
  return part;
}

}  // namespace

KvCache::KvCache(const ModelShape& s, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
                 const at::TensorOptions& computed, Communicator& comm)
    : shape_(s),
      settings_(settings),
      computed_(c10::typeMetaToScalarType(computed.dtype())),
      stored_(settings.stored.value_or(computed_)),
      comm_(comm),
      held_(static_cast<size_t>(comm.size()), 0) {
  for (int64_t i = 0; i < s.layers; ++i) {
    const PatternSpec& pattern = patterns[static_cast<size_t>(i) % patterns.size()];
    const auto same = std::ranges::find_if(kinds_, [&](const LayerKind& kind) { return kind.spec == pattern; });
    kind_of_layer_.push_back(static_cast<size_t>(same - kinds_.begin()));
    if (same != kinds_.end()) continue;
    if (has_mask(pattern)) {
      throw Error(
          ErrorKind::kUsage, "sample",
          "a mask of tokens is one of a whole text, and cannot be extended while text is generated: generate with "
          "another pattern");
    }
    LayerKind kind;
    kind.spec = pattern;
    kind.adaptive = is_adaptive(pattern);
    kind.divisor = output_divisor(pattern);
    kinds_.push_back(std::move(kind));
  }
  for (LayerKind& kind : kinds_) {
    if (!kind.adaptive) {
      kind.whole = make_pattern(kind.spec, shape(settings.context));
    } else if (comm.size() > 1) {
      throw Error(ErrorKind::kUsage, "sample",
                  "a pattern with map = \"adaptive\" selects blocks from all queries and keys of the text, which " +
                      counted(comm.size(), "rank") + " do not have in one place: generate with it on one rank");
    }
  }
  const int64_t rows = most_of_rank(settings.positions, comm.size());
  for (int64_t i = 0; i < s.layers; ++i) {
    for (std::vector<at::Tensor>* tensors : {&keys_, &values_}) {
      tensors->push_back(at::empty({rows, s.kv_heads, s.head_dim()}, computed.dtype(stored_)));
    }
    queries_.push_back(kind_of(i).adaptive ? at::empty({rows, s.heads, s.head_dim()}, computed) : at::Tensor());
  }
}

double KvCache::bytes(const ModelShape& s, const std::vector<PatternSpec>& patterns, const CacheSettings& settings,
                      at::ScalarType computed, int ranks) {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const at::ScalarType stored = settings.stored.value_or(computed);
  const double of_key = 2 * number(s.kv_width()), rows = number(most_of_rank(settings.positions, ranks));
  double bytes = number(s.layers) * rows * of_key * number(static_cast<int64_t>(c10::elementSize(stored)));
  const auto e = static_cast<double>(c10::elementSize(computed));
  if (stored != computed) bytes += std::min(number(kConvertedKeys), rows) * of_key * e;
  if (std::ranges::any_of(patterns, is_adaptive)) {
    bytes += number(s.layers) * rows * number(s.q_width()) * e;
  }
  return bytes;
}

AttentionShape KvCache::shape(int64_t length) const {
  const ModelShape& s = shape_;
  return {.batch = 1, .heads = s.heads, .kv_heads = s.kv_heads, .q_len = length, .k_len = length, .query_offset = 0};
}

void KvCache::clear() {
  length_ = 0;
  std::fill(held_.begin(), held_.end(), 0);
  own_.clear();
}

bool KvCache::divides(int64_t n) const {
  if (length_ > 0 || n == 0) return false;
  if (std::ranges::any_of(kinds_, [](const LayerKind& kind) { return kind.adaptive; })) return false;
  const std::vector<int64_t> counts = layout_counts(settings_.layout, n, comm_.size());
  return std::find(counts.begin(), counts.end(), 0) == counts.end();
}

// Adds positions, which are after all of the rank's own.
void KvCache::hold(int rank, const Span& positions) {
  held_[static_cast<size_t>(rank)] += positions.count;
  if (rank != comm_.rank() || positions.empty()) return;
  if (!own_.empty()) {
    Span& last = own_.back();
    const bool single = last.count == 1;
    const int64_t stride = single ? positions.begin - last.begin : last.stride;
    if (positions.begin == last.last() + stride && (positions.count == 1 || positions.stride == stride)) {
      last = {last.begin, stride, last.count + positions.count};
      return;
    }
  }
  own_.push_back(positions);
}

// The pattern of the first n positions of the context.
PatternSpec KvCache::of_prefix(const LayerKind& kind, int64_t n) const {
  if (same_for_any_length(kind.spec)) return kind.spec;
  PatternSpec prefix;
  prefix.kind = PatternSpec::Kind::kSlices;
  for (Slice slice : kind.whole.slices) {
    slice.queries = slice.queries.clip(0, n - 1);
    slice.keys = slice.keys.clip(0, n - 1);
    if (!slice.queries.empty() && !slice.keys.empty()) prefix.slices.push_back(slice);
  }
  return prefix;
}

LayerRequests KvCache::begin_divided(int64_t n) {
  added_ = n;
  own_before_ = 0;
  LayerRequests layers;
  layers.of_layer = kind_of_layer_;
  for (const LayerKind& kind : kinds_) {
    // By the ring a rank holds two blocks of other ranks' keys at most, as generation_bytes counts. What `auto` takes
    // may hold those of all ranks.
    layers.distinct.push_back({.shape = shape(n),
                               .pattern = of_prefix(kind, n),
                               .layout = settings_.layout,
                               .schedule = ScheduleKind::kRing,
                               .ranks = comm_.size(),
                               .uneven_lengths = {},
                               .keep_last = false});
  }
  layers.set_layout(settings_.layout);
  const Layout layout = query_layout(layers.distinct[0]);
  for (int rank = 0; rank < comm_.size(); ++rank) {
    for (const Span& span : layout.spans[static_cast<size_t>(rank)]) hold(rank, span);
  }
  return layers;
}

void KvCache::begin(int64_t n) {
  added_ = n;
  own_before_ = own_length();
  std::vector<int64_t> taken;
  for (int64_t i = 0; i < n; ++i) {
    const auto rank = static_cast<int>(std::ranges::min_element(held_) - held_.begin());
    hold(rank, {length_ + i, 1, 1});
    if (rank == comm_.rank()) taken.push_back(i);
  }
  taken_ = at::tensor(taken, at::TensorOptions(at::kLong)).to(keys_[0].device());
  for (LayerKind& kind : kinds_) {
    if (!kind.adaptive) kind.pieces = pieces_of(kind.whole);
  }
}

void KvCache::put(const at::Tensor& k, const at::Tensor& v, int64_t layer, int64_t first) const {
  keys_[static_cast<size_t>(layer)].narrow(0, first, k.size(0)).copy_(k);
  values_[static_cast<size_t>(layer)].narrow(0, first, v.size(0)).copy_(v);
}

// Cuts this rank's rows into pieces that are converted at once, and those into tiles.
std::vector<KvCache::Piece> KvCache::pieces_of(const Pattern& pattern) const {
  const int64_t rows = own_length();
  const int64_t step = stored_ == computed_ ? std::max<int64_t>(1, rows) : kConvertedKeys;
  std::vector<Piece> pieces;
  for (int64_t first = 0; first < rows; first += step) {
    Piece piece{first, std::min(step, rows - first), {}};
    piece.tiles = make_tiles(pattern, Span::range(length_, length_ + added_), part_of(own_, piece.first, piece.count));
    if (!piece.tiles.empty()) pieces.push_back(std::move(piece));
  }
  return pieces;
}

// The pattern of the queries of this forward. Adaptive maps are selected from all queries and keys so far.
Pattern KvCache::select(const PatternSpec& spec, int64_t layer) const {
  const auto i = static_cast<size_t>(layer);
  const int64_t end = length_ + added_;
  PlanRequest request{.shape = shape(end), .pattern = selection_of(spec), .uneven_lengths = {}};
  request = select_blocks(request, queries_[i].narrow(0, 0, end).unsqueeze(0),
                          keys_[i].narrow(0, 0, end).to(computed_).unsqueeze(0), comm_,
                          "sample, layer " + std::to_string(layer));
  return make_pattern(with_selected(spec, request.pattern, length_, settings_.context), shape(settings_.context));
}

// Attention over this rank's own keys.
PartialAttention KvCache::attend_own(const at::Tensor& q, int64_t layer, const std::vector<Piece>& pieces) const {
  const std::unique_ptr<Kernel> kernel = make_kernel(KernelKind::kAuto, q, /*dropout=*/false, shape_.softcap > 0);
  KernelCall call;
  call.softcap = shape_.softcap;
  call.scale = shape_.attention_scale();
  call.group = shape_.heads / shape_.kv_heads;
  const Kernel::Poll poll = comm_.size() > 1 ? Kernel::Poll([this] { comm_.progress(); }) : nullptr;
  kernel->begin_forward(q, call);
  for (const Piece& piece : pieces) {
    const auto rows = [&](const std::vector<at::Tensor>& cached) {
      return cached[static_cast<size_t>(layer)].narrow(0, piece.first, piece.count).to(computed_).unsqueeze(0);
    };
    KeyBlock block;
    block.k = rows(keys_), block.v = rows(values_);
    block.batch = {0, 1, 1};
    block.heads = Span::range(0, shape_.kv_heads);
    kernel->forward(block, piece.tiles, poll);
  }
  PartialAttention own;
  kernel->finish_forward(own.out, own.lse);
  own.out = own.out.to(accumulator_type(computed_));
  return own;
}

Attended KvCache::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                         const at::Tensor& sinks) {
  const LayerKind& kind = kind_of(layer);
  if (taken_.numel() > 0) put(k[0].index_select(0, taken_), v[0].index_select(0, taken_), layer, own_before_);
  if (kind.adaptive) queries_[static_cast<size_t>(layer)].narrow(0, length_, added_).copy_(q[0]);
  const PartialAttention own =
      kind.adaptive ? attend_own(q, layer, pieces_of(select(kind.spec, layer))) : attend_own(q, layer, kind.pieces);
  const PartialAttention merged = merge_over_ranks(comm_, own, {"sample, merging attention", layer, "layer"});
  if (sinks.defined()) add_sinks(merged.out, merged.lse, sinks);
  Attended attended;
  attended.kept = {merged.out.to(computed_)};
  attended.divisor = kind.divisor;
  return attended;
}

Attended KvCache::attend_divided(const Attend& attention, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 int64_t layer, const at::Tensor& sinks) const {
  put(k[0], v[0], layer, own_before_);
  const auto as_cached = [&](const at::Tensor& t) { return t.to(stored_).to(computed_); };
  Attended attended = attention(q, as_cached(k), as_cached(v), layer, sinks);
  attended.divisor = kind_of(layer).divisor;  // not that of its slices
  return attended;
}

}  // namespace annulus
