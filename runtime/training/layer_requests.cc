// See layer_requests.h.
#include "runtime/training/layer_requests.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/plan/balance.h"
#include "attention/plan/choice.h"
#include "attention/plan/layout.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
double LayerRequests::pairs_per_token() const {
  double pairs = 0;
  for (const size_t i : of_layer) {
    const AttentionShape& shape = distinct[i].shape;
    PlanRequest known = distinct[i];
    known.pattern = with_nearest_blocks(with_causal_members(std::move(known.pattern)), shape);
    Pattern pattern = *cached_pattern(known);
    for (Slice& slice : pattern.slices) slice.mask = -1;
    pairs += static_cast<double>(count_pairs(pattern)) / static_cast<double>(shape.batch * shape.q_len);
  }
  return pairs;
}

bool LayerRequests::see_later() const {
  return std::any_of(distinct.begin(), distinct.end(),
                     [](const PlanRequest& request) { return sees_later(request.pattern, request.shape); });
}

std::vector<PlanRequest> LayerRequests::of_rows(int64_t first, int64_t count) const {
  std::vector<PlanRequest> requests = distinct;
  for (PlanRequest& request : requests) {
    request.shape.batch = count;
    request.pattern = of_batch_rows(std::move(request.pattern), first, count);
    if (request.balance_by) request.balance_by = of_batch_rows(std::move(*request.balance_by), first, count);
  }
  return requests;
}

void LayerRequests::set_layout(LayoutKind layout) {
  for (PlanRequest& request : distinct) request.layout = layout, request.balance_by.reset();
  if (distinct.size() < 2 || layout != LayoutKind::kBalanced) return;
  std::vector<PatternSpec> patterns;
  for (const size_t i : of_layer) patterns.push_back(distinct[i].pattern);
  const PatternSpec together = balanced_together(patterns);
  for (PlanRequest& request : distinct) request.balance_by = together;
}

void set_documents(std::vector<PlanRequest>& requests, const std::vector<RowParts>& rows) {
  std::vector<std::vector<int64_t>> lengths, parents;
  for (const RowParts& row : rows) {
    lengths.push_back(row.lengths);
    parents.push_back(row.parents);
  }
  if (std::none_of(rows.begin(), rows.end(), [](const RowParts& row) { return row.has_trees(); })) {
    for (PlanRequest& request : requests) {
      request.pattern.documents = lengths;
      if (request.balance_by) request.balance_by->documents = lengths;
    }
    return;
  }
  require_causal(requests);
  PatternSpec trees;
  trees.kind = PatternSpec::Kind::kTree;
  trees.tree = {std::move(lengths), std::move(parents)};
  for (PlanRequest& request : requests) request.pattern = trees;
}

void require_causal(const std::vector<PlanRequest>& requests) {
  for (const PlanRequest& request : requests) {
    if (request.pattern == causal_pattern()) continue;
    throw Error(
        ErrorKind::kPlan, "attention",
        "the data hold prefix trees, along whose paths attention must be causal in every layer, but the pattern " +
            request.pattern.text() +
            " is another: set model.pattern = { kind = \"causal\" }, or make shards of the rollouts without "
            "--trees and --group");
  }
}

void take_data(std::vector<Stage>& stages, bool weighs, bool trees) {
  for (Stage& stage : stages) {
    stage.weighs = weighs;
    if (trees) require_causal(stage.layers.distinct);
  }
}

bool layout_follows_documents(const Config& config) {
  return config.data.documents &&
         (config.attention.layout == to_string(LayoutKind::kBalanced) || config.attention.layout == kAutoLayout);
}

namespace {

bool any_mask(const LayerRequests& layers) {
  return std::ranges::any_of(layers.distinct, [](const PlanRequest& r) { return has_mask(r.pattern); });
}

std::vector<Span> all_queries(const PlanRequest& request) { return {Span::range(0, request.shape.q_len)}; }

// The queries whose bits a rank with these ones needs.
std::vector<Span> needed(const PlanRequest& request, const std::vector<Span>& own) {
  return moves_queries(request.schedule) ? all_queries(request) : own;
}

// Calls visit(spec) for a pattern and all its members that have a mask.
template <typename Spec, typename Visit>
void for_each_mask(Spec& pattern, const Visit& visit) {
  if (!pattern.mask.empty()) visit(pattern.mask);
  for (auto& member : pattern.members) for_each_mask(member, visit);
}

// The queries of these rows whose bits a rank holds in training.
std::vector<Span> held_queries(const Config& config, const LayerRequests& layers, const Span& rows, int rank) {
  if (layout_follows_documents(config)) return all_queries(layers.distinct[0]);
  return query_layout(layers.of_rows(rows.begin, rows.count)[0]).spans.at(static_cast<size_t>(rank));
}

}  // namespace

void hold_bits(std::vector<PlanRequest>& requests, const std::vector<Span>& queries) {
  for (PlanRequest& request : requests) {
    if (!has_mask(request.pattern)) continue;
    for_each_mask(request.pattern, [](MaskSpec& mask) {
      if (!mask.file.empty()) mask.given = {};
    });
    request.pattern = read_block_maps(request.pattern, request.shape, needed(request, queries));
  }
}

void hold_bits(const Config& config, LayerRequests& layers, const Span& rows, int rank) {
  hold_bits(layers.distinct, held_queries(config, layers, rows, rank));
}

std::vector<PlanRequest> plannable_rows(LayerRequests layers, int64_t rows, int rank) {
  if (any_mask(layers)) {
    hold_bits(layers.distinct, query_layout(layers.of_rows(0, rows)[0]).spans.at(static_cast<size_t>(rank)));
  }
  return layers.of_rows(0, rows);
}

// The masks of the rows of all ranks, and of its own where these are others.
int64_t mask_bytes(const Config& config, const LayerRequests& layers, int64_t rows, int rank) {
  if (!any_mask(layers)) return 0;
  std::set<const TokenMask*> seen;
  int64_t bytes = 0;
  const std::vector<Span> queries = held_queries(config, layers, Span::range(0, rows), rank);
  const std::vector<PlanRequest> own = layers.of_rows(0, rows);
  for (const std::vector<PlanRequest>* requests : {&layers.distinct, &own}) {
    for (const PlanRequest& request : *requests) {
      for_each_mask(request.pattern, [&](const MaskSpec& mask) {
        if (!seen.insert(mask.given.get()).second) return;
        const bool holds = !mask.given->held.empty();  // a program has made it
        bytes += holds ? mask.given->bytes() : mask.given->bytes_holding(needed(request, queries));
      });
    }
  }
  return bytes;
}

namespace {

// Whether a machine's profile is needed. One that is named is read in any case, so that a wrong name is an error.
bool chooses(const Config& c) {
  return parse_schedule(c.attention.schedule, "attention.schedule") == ScheduleKind::kAuto ||
         c.attention.layout == kAutoLayout || !c.attention.machine.empty();
}

// Refuses requests that cannot be planned.
void validate_all(const LayerRequests& requests) {
  for (const PlanRequest& request : requests.distinct) validate(request);
}

// Divides rows by the layout in which all layers together are predicted to take the least time. Where documents are
// apart that is the balanced one, which is dealt by the documents of each batch; they are not known yet.
void set_auto_layout(LayerRequests& requests, const Config& c, int64_t batch) {
  if (c.attention.layout != kAutoLayout) return;
  if (c.data.documents) {
    requests.set_layout(LayoutKind::kBalanced);
    requests.layout_reason = "balanced: each batch is dealt by the pairs of its documents";
    return;
  }
  if (requests.distinct[0].ranks == 1) return;
  const int64_t rows = ceil_div(batch, c.mesh.data);
  const auto placed = [&](LayoutKind layout) {
    requests.set_layout(layout);
    validate_all(requests);
    std::vector<RepeatedCall> calls;
    for (PlanRequest& request : requests.of_rows(0, rows)) calls.push_back({std::move(request), 0});
    for (const size_t which : requests.of_layer) ++calls[which].times;
    return calls;
  };
  const LayoutChoice choice = choose_layout(placed, "all layers");
  requests.set_layout(choice.layout);
  requests.layout_reason = choice.reason;
}

LayerRequests layer_requests(const Config& c, int64_t batch, int64_t context, int context_ranks) {
  PlanRequest request{.shape = {.batch = batch,
                                .heads = c.model.heads,
                                .kv_heads = c.model.kv_heads,
                                .q_len = context,
                                .k_len = context,
                                .query_offset = 0},
                      .pattern = {},
                      .layout = c.attention.layout == kAutoLayout
                                    ? LayoutKind::kZigzag
                                    : parse_layout(c.attention.layout, "attention.layout"),
                      .schedule = parse_schedule(c.attention.schedule, "attention.schedule"),
                      .ranks = context_ranks,
                      .within = static_cast<int>(c.attention.within),
                      .even = c.attention.even,
                      .uneven_lengths = {}};
  set_mask_limit(c.memory.masks << 20);
  if (chooses(c)) request.terms = attention_terms(c, c.device);
  LayerRequests requests;
  std::vector<std::string> texts;
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    const std::string text = c.model.pattern.of(layer).text();
    const auto found = std::find(texts.begin(), texts.end(), text);
    requests.of_layer.push_back(static_cast<size_t>(found - texts.begin()));
    if (found != texts.end()) continue;
    texts.push_back(text);
    request.pattern = read_block_maps(c.model.pattern.of(layer), request.shape, std::vector<Span>{});
    if (c.attention.layout != kAutoLayout) validate(request);
    requests.distinct.push_back(request);
  }
  requests.set_layout(request.layout);
  set_auto_layout(requests, c, batch);
  validate_all(requests);
  for (const PlanRequest& of : requests.distinct) {
    for (int rank = 0; rank < context_ranks && has_mask(of.pattern); ++rank) {
      const std::vector<Span> queries = held_queries(c, requests, Span::range(0, ceil_div(batch, c.mesh.data)), rank);
      for_each_mask(of.pattern, [&](const MaskSpec& mask) {
        if (mask.file.empty()) return;  // a program has made it, with the bits that it holds
        require_mask_limit(*mask.given, needed(of, queries), "the mask in " + mask.file);
      });
    }
  }
  return requests;
}

}  // namespace

TermsPointer attention_terms(const Config& c, std::string_view device) {
  const int64_t bytes = c.model.dtype == "fp64" ? 8 : c.model.dtype == "fp32" ? 4 : 2;
  // Memory decides how long rows may be. Batches whose documents are apart are planned later than the memory plan,
  // which counts what is chosen without documents: the leanest of their schedules holds no more.
  PlanTerms terms = *terms_of(c.attention.machine, "attention.machine", device, c.model.head_dim(), bytes);
  terms.memory = kLeanest;
  return terms;
}

std::vector<Stage> training_stages(const Config& c, int context_ranks) {
  std::vector<Stage> stages;
  for (const DataConfig::Stage& stage : c.data.stages()) {
    stages.push_back({stage.step, stage.context, stage.batch, stage.accumulate,
                      layer_requests(c, stage.batch, stage.context, context_ranks)});
  }
  return stages;
}

void keep_schedules(const std::vector<Stage>& chosen, int64_t data_ranks, std::vector<Stage>& stages) {
  for (size_t s = 0; s < stages.size(); ++s) {
    std::vector<PlanRequest>& requests = stages[s].layers.distinct;
    const std::vector<PlanRequest> own = chosen[s].layers.of_rows(0, ceil_div(chosen[s].batch, data_ranks));
    for (size_t i = 0; i < requests.size(); ++i) {
      const PlanRequest resolved = resolve_schedule(own[i]);
      requests[i].schedule = resolved.schedule;
      requests[i].within = resolved.within;
    }
    stages[s].layers.set_layout(own[0].layout);
  }
}

void choose_for_job(std::vector<Stage>& stages, const Config& config, std::string_view device, const RankHosts& hosts) {
  if (!chooses(config)) return;
  const TermsPointer terms = on_hosts(attention_terms(config, device), hosts);
  for (Stage& stage : stages) {
    for (PlanRequest& request : stage.layers.distinct) request.terms = terms;
    set_auto_layout(stage.layers, config, stage.batch);
  }
}

std::vector<std::string> schedule_lines(const std::vector<Stage>& stages, int ranks) {
  std::vector<std::string> lines;
  for (const Stage& stage : stages) {
    const int64_t context = stage.layers.distinct.front().ranks;
    if (!stage.layers.layout_reason.empty()) {
      lines.push_back("layout of rows of " + with_commas(stage.context, "token") + ": " + stage.layers.layout_reason);
    }
    for (const PlanRequest& request : stage.layers.of_rows(0, stage.batch * context / ranks)) {
      if (request.ranks == 1 || request.schedule != ScheduleKind::kAuto || is_adaptive(request.pattern)) continue;
      lines.push_back("attention of rows of " + with_commas(stage.context, "token") + ": " +
                      choose_plan(request).reason());
    }
  }
  return lines;
}

}  // namespace annulus
