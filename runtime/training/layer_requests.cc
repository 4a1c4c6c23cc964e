// See layer_requests.h.
#include "runtime/training/layer_requests.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/pattern/block_map.h"
#include "attention/plan/balance.h"
#include "attention/plan/choice.h"
#include "attention/plan/layout.h"
#include "attention/plan/machine.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/tensor_files/block_map_file.h"
#include "runtime/training/mask_bits.h"

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
  if (distinct.size() < 2 || !is_dealt(layout)) return;
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
  if (!config.data.documents) return false;
  const std::optional<LayoutKind> layout = parse_layout_or_auto(config.attention.layout, "attention.layout");
  return !layout || is_dealt(*layout);
}

namespace {

// Whether a machine's profile is needed. One that is named is read in any case, so that a wrong name is an error.
bool chooses(const Config& c) {
  return parse_schedule(c.attention.schedule, "attention.schedule") == ScheduleKind::kAuto ||
         c.attention.layout == kAutoLayout || !c.attention.machine.empty();
}

void validate_all(const LayerRequests& requests) {
  for (const PlanRequest& request : requests.distinct) validate(request);
}

// The calls of all layers for the rows of a ring, which then has the layout.
std::vector<RepeatedCall> calls_in(LayerRequests& requests, LayoutKind layout, int64_t rows) {
  requests.set_layout(layout);
  validate_all(requests);
  std::vector<RepeatedCall> calls;
  for (PlanRequest& request : requests.of_rows(0, rows)) calls.push_back({std::move(request), 0});
  for (const size_t which : requests.of_layer) ++calls[which].times;
  return calls;
}

// Divides rows by the layout in which all layers together are predicted to take the least time. Where documents are
// apart that is one that is dealt by the documents of each batch; they are not known yet.
void set_auto_layout(LayerRequests& requests, const Config& c, int64_t batch) {
  if (c.attention.layout != kAutoLayout) return;
  if (c.data.documents) {
    const ScheduleKind schedule = requests.distinct[0].schedule;
    const bool ring = schedule == ScheduleKind::kRing || schedule == ScheduleKind::kDoubleRing ||
                      schedule == ScheduleKind::kUlyssesRing;
    requests.set_layout(ring ? LayoutKind::kPerDocument : LayoutKind::kBalanced);
    requests.layout_reason = ring ? "per-document: a ring's steps are even in each document"
                                  : "balanced: each batch is dealt by the pairs of its documents";
    return;
  }
  if (requests.distinct[0].ranks == 1) return;
  const int64_t rows = ceil_div(batch, c.mesh.data);
  const LayoutChoice choice =
      choose_layout([&](LayoutKind layout) { return calls_in(requests, layout, rows); }, "all layers");
  requests.set_layout(choice.layout);
  requests.layout_reason = choice.reason;
}

// Gives each request the terms, with the number of layers whose calls keep something on the device at a time.
void set_terms(LayerRequests& requests, const Config& c, PlanTerms terms) {
  const auto layers = static_cast<int64_t>(requests.of_layer.size());
  const int64_t offloaded = c.memory.offload == "none" ? 0 : std::max<int64_t>(0, layers - c.memory.device_layers);
  std::vector<int64_t> keep(requests.distinct.size());
  for (int64_t layer = offloaded; layer < layers; ++layer) ++keep[requests.of_layer[static_cast<size_t>(layer)]];
  for (size_t i = 0; i < keep.size(); ++i) {
    terms.layers = std::max<int64_t>(1, keep[i]);
    requests.distinct[i].terms = terms;
  }
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
  LayerRequests requests;
  std::vector<std::string> texts;
  for (int64_t layer = 0; layer < c.model.layers; ++layer) {
    const std::string text = c.model.pattern.of(layer).text();
    const auto found = std::find(texts.begin(), texts.end(), text);
    requests.of_layer.push_back(static_cast<size_t>(found - texts.begin()));
    if (found != texts.end()) continue;
    texts.push_back(text);
    request.pattern = read_block_maps(c.model.pattern.of(layer), request.shape, HeldBits{});
    if (c.attention.layout != kAutoLayout) validate(request);
    requests.distinct.push_back(request);
  }
  if (chooses(c)) set_terms(requests, c, *attention_terms(c, c.device));
  requests.set_layout(request.layout);
  set_auto_layout(requests, c, batch);
  validate_all(requests);
  require_mask_limits(c, requests, batch, context_ranks);
  return requests;
}

}  // namespace

TermsPointer attention_terms(const Config& c, std::string_view device) {
  const int64_t bytes = c.model.dtype == "fp64" ? 8 : c.model.dtype == "fp32" ? 4 : 2;
  // Until it is known what is free (choose_for_run), memory decides: it bounds how long rows may be.
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

namespace {

bool chooses_schedules(const Config& c) { return c.attention.schedule == to_string(ScheduleKind::kAuto); }

// What is asked of `auto`: a record of another question is no answer.
std::string question(const std::vector<Stage>& stages, const Config& c, std::string_view device,
                     const PlanTerms& terms) {
  std::string text = std::string(device) + ", " + terms.machine.name + (c.data.documents ? ", documents" : "");
  for (const Stage& stage : stages) {
    LayerRequests layers = stage.layers;
    if (c.attention.layout == kAutoLayout) layers.set_layout(LayoutKind::kZigzag);
    text += "\nlayout " + c.attention.layout;
    for (PlanRequest& request : layers.of_rows(0, ceil_div(stage.batch, c.mesh.data))) {
      request.terms = {};
      text += "; " + request.text();
    }
  }
  return checksum(text.data(), text.size());
}

// `bytes` are those that the calls of a request may hold where they choose again.
void take_schedule(PlanRequest& request, ScheduleKind schedule, int within, double bytes) {
  request.schedule = schedule;
  request.within = within;
  if (request.terms->memory == kLeanest) return;
  PlanTerms terms = *request.terms;
  terms.memory = bytes;
  request.terms = std::move(terms);
}

// Takes what `record` says if it answers `asked`. Returns whether it does; if not, the stages are undefined.
bool take_recorded(const std::string& record, const std::string& asked, const Config& c, std::vector<Stage>& stages) {
  try {
    const nlohmann::json known = nlohmann::json::parse(record);
    if (known.at("asked").get<std::string>() != asked) return false;
    PlanTerms terms = *stages[0].layers.distinct[0].terms;
    if (known.contains("machine")) {
      terms.machine = parse_machine(known.at("machine").get<std::string>(), "the machine of the checkpoint");
    }
    terms.memory = known.at("leanest").get<bool>() ? kLeanest : 0;
    terms.or_leanest = true;
    for (size_t s = 0; s < stages.size(); ++s) {
      LayerRequests& layers = stages[s].layers;
      const nlohmann::json& of_stage = known.at("stages").at(s);
      set_terms(layers, c, terms);
      layers.set_layout(parse_layout(of_stage.at("layout").get<std::string>(), "the layout of the checkpoint"));
      for (size_t i = 0; i < layers.distinct.size(); ++i) {
        const nlohmann::json& call = of_stage.at("calls").at(i);
        take_schedule(layers.distinct[i],
                      parse_schedule(call.at("schedule").get<std::string>(), "the schedule of the checkpoint"),
                      call.at("within").get<int>(), call.at("bytes").get<double>());
      }
    }
    return true;
  } catch (const nlohmann::json::exception&) {
  } catch (const Error&) {  // a name that only another version has
  }
  return false;
}

// Whether the calls of a request choose for themselves. With a mask of tokens ranks hold the bits for one schedule.
bool calls_choose(const PlanRequest& request, const Config& c) {
  return chooses_schedules(c) && request.ranks > 1 && !has_mask(request.pattern) &&
         (c.data.documents || is_adaptive(request.pattern));
}

// The machine is needed where calls are to choose again as they did.
std::string record_of(const std::vector<Stage>& stages, const std::string& asked, const Config& c) {
  const PlanTerms& terms = *stages[0].layers.distinct[0].terms;
  nlohmann::json record = {{"asked", asked}, {"leanest", terms.memory == kLeanest}};
  for (const Stage& stage : stages) {
    nlohmann::json calls;
    for (const PlanRequest& request : stage.layers.distinct) {
      if (calls_choose(request, c)) record["machine"] = terms.machine.text();
      calls.push_back(
          {{"schedule", to_string(request.schedule)}, {"within", request.within}, {"bytes", request.terms->memory}});
    }
    record["stages"].push_back({{"layout", to_string(stage.layers.distinct[0].layout)}, {"calls", calls}});
  }
  return record.dump();
}

// "attention of rows of 65,536 tokens: "
std::string title(const char* what, const Stage& stage) {
  return what + std::string(" of rows of ") + with_commas(stage.context, "token") + ": ";
}

// "ring; group-cast, within 8, layout zigzag"
std::string text_of(const Stage& stage, bool layout = true) {
  std::vector<std::string> schedules;
  for (const PlanRequest& r : stage.layers.distinct) {
    if (is_adaptive(r.pattern)) continue;
    PlanCandidate taken;
    taken.schedule = r.schedule, taken.within = r.within;
    if (std::ranges::find(schedules, taken.name()) == schedules.end()) schedules.push_back(taken.name());
  }
  const std::string name = "layout " + std::string(to_string(stage.layers.distinct[0].layout));
  return join(schedules, "; ") + (!layout ? "" : schedules.empty() ? name : ", " + name);
}

// Chooses for one stage, whose requests have their terms. Returns false if it is not known what fits. Without `lacks`
// all that the terms allow fits.
bool choose_for_stage(Stage& stage, const Config& c, const Lacks& lacks, RunChoice& run) {
  LayerRequests& layers = stage.layers;
  const bool any_layout = c.attention.layout == kAutoLayout;
  const bool compares = any_layout && !c.data.documents;
  const LayerRequests asked = layers;
  CallsChoice choice([&](LayoutKind layout) { return calls_in(layers, layout, ceil_div(stage.batch, c.mesh.data)); },
                     compares ? layouts_of_auto() : std::vector{layers.distinct[0].layout}, "all layers");
  double least = std::numeric_limits<double>::infinity();
  LayerRequests leanest;
  for (;;) {
    layers = asked;
    layers.set_layout(choice.best().layout);
    for (size_t i = 0; i < layers.distinct.size(); ++i) {
      const PlanChoice& plan = choice.best().plans[i];
      take_schedule(layers.distinct[i], plan.request.schedule, plan.request.within, plan.chosen().bytes);
    }
    if (!lacks) break;
    const std::optional<double> missing = lacks({stage});
    if (!missing) return false;
    if (*missing <= 0) break;
    if (*missing < least) least = *missing, leanest = layers;
    if (choice.refuse("with it the run would take " + bytes_text(*missing) + " more than is free")) continue;
    layers = std::move(leanest);
    if (compares) layers.layout_reason.clear();
    run.leanest = true;
    run.lines.push_back(title("attention", stage) + text_of(stage) + ", with which the run takes least: " +
                        bytes_text(least) + " more than is free, with what caches and freed memory may hold");
    return true;
  }
  if (compares) layers.layout_reason = choice.reason();
  if (any_layout) run.lines.push_back(title("layout", stage) + layers.layout_reason);
  for (const PlanChoice& plan : choice.best().plans) {
    if (chooses_schedules(c) && !is_adaptive(plan.request.pattern)) {
      run.lines.push_back(title("attention", stage) + plan.reason());
    }
  }
  return true;
}

}  // namespace

RunChoice choose_for_run(std::vector<Stage>& stages, const Config& c, std::string_view device, const RankHosts& hosts,
                         const Lacks& lacks, const std::string& recorded) {
  RunChoice choice;
  if (hosts.ranks() == 1 || (!chooses_schedules(c) && c.attention.layout != kAutoLayout)) return choice;
  PlanTerms terms = *on_hosts(attention_terms(c, device), hosts);
  terms.backward = stages[0].layers.distinct[0].terms->backward, terms.or_leanest = true;
  const std::string asked = question(stages, c, device, terms);
  std::vector<Stage> chosen = stages;
  if (!recorded.empty() && take_recorded(recorded, asked, c, chosen)) {
    const std::optional<double> missing = lacks(chosen);
    if (!missing || *missing <= 0) {
      stages = std::move(chosen);
      for (const Stage& stage : stages) {
        choice.lines.push_back(title("attention", stage) + text_of(stage) + ", as before the resume");
      }
      choice.record = recorded;
      return choice;
    }
    choice.warning = "with the attention that it had before the resume the run would take " + bytes_text(*missing) +
                     " more than is free: it chooses again, and from here on its sums may be rounded differently";
  }
  const auto choose = [&](double memory) {
    chosen = stages;
    choice.lines.clear();
    choice.leanest = memory == kLeanest;
    terms.memory = memory;
    for (Stage& stage : chosen) {
      set_terms(stage.layers, c, terms);
      if (!choose_for_stage(stage, c, memory == kLeanest ? nullptr : lacks, choice)) return false;
    }
    return true;
  };
  if (!choose(0)) choose(kLeanest);
  stages = std::move(chosen);
  choice.record = record_of(stages, asked, c);
  return choice;
}

std::string attention_text(const std::vector<Stage>& stages, bool layouts) {
  std::vector<std::string> texts;
  for (const Stage& stage : stages) {
    if (stage.layers.distinct[0].ranks == 1) return "";
    std::string text = text_of(stage, layouts);
    if (std::ranges::find(texts, text) == texts.end()) texts.push_back(std::move(text));
  }
  return join(texts, "; ");
}

void let_calls_choose(std::vector<Stage>& stages, const Config& c) {
  for (Stage& stage : stages) {
    for (PlanRequest& request : stage.layers.distinct) {
      if (!calls_choose(request, c)) continue;
      request.schedule = ScheduleKind::kAuto;
      request.within = static_cast<int>(c.attention.within);
    }
  }
}

}  // namespace annulus
