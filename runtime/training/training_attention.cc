// The attention of a step: plans, the calls of each layer, and the agreement of the ranks on them. See training.h.
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/execution/planned_call.h"
#include "attention/pattern/pattern.h"
#include "attention/proof/plans.h"
#include "runtime/model/planned_attention.h"
#include "runtime/training/job.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

KernelKind kernel(const Config& c) { return parse_kernel(c.attention.kernel, "attention.kernel"); }

// The pairs of the tiles of a forward. What a mask hides counts as if it did not.
double computed_pairs(const Program& program) {
  double pairs = 0;
  for (const Step& step : program.forward) {
    for (const Tile& t : step.tiles) {
      const Slice slice{t.batch, t.heads, t.query_positions, t.key_positions, t.band};
      pairs += static_cast<double>(count_pairs({.shape = {}, .slices = {slice}}));
    }
  }
  return pairs;
}

}  // namespace

void Training::plan_ahead(const std::vector<PlanRequest>& requests) {
  for (const PlanRequest& request : requests) {
    annulus::plan_ahead(request, mesh_.index("context"), proves_by_default());
  }
}

std::vector<PlannedCall> Training::calls(const std::vector<PlanRequest>& requests, const Dropout& dropout,
                                         const std::string& when) {
  std::vector<PlannedCall> calls;
  const std::vector<size_t>& of_layer = stages_[stage_].layers.of_layer;
  for (size_t i = 0; i < of_layer.size(); ++i) {
    AttentionCall call;
    call.request = requests[of_layer[i]];
    call.comm = &mesh_.axis("context");
    call.kernel = kernel(config_);
    call.softcap = config_.model.softcap;
    call.sinks = config_.model.attention_sinks.of(static_cast<int64_t>(i));
    call.scale = config_.model.attention_scale();
    call.dropout = dropout;
    call.dropout.layer = static_cast<int64_t>(i);
    call.label = when + ", attention, layer " + std::to_string(i);
    // Gradients and weights are being transferred meanwhile.
    const bool transfers = mesh_.world().size() > 1;
    calls.emplace_back(std::move(call), transfers ? Poll([this] { progress(); }) : nullptr);
  }
  return calls;
}

void Training::plan(const std::vector<PlannedCall>& calls, OpLabel label) const {
  plan_calls(calls, {compute_dtype(config_), config_.model.head_dim(), device_.type()}, label);
}

Attend Training::attend(std::vector<PlannedCall> calls) {
  return [calls = std::move(calls)](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                                    const at::Tensor& sinks) {
    return attended(q, k, v, calls[static_cast<size_t>(layer)], sinks);
  };
}

// Layers with one pattern have one plan, and so have the steps whose rows have no documents of their own.
double Training::planned_pairs(const std::vector<PlannedCall>& calls) {
  std::unordered_map<uint64_t, double> known;
  double pairs = 0;
  for (const PlannedCall& call : calls) {
    if (!call.plan()) return std::numeric_limits<double>::quiet_NaN();
    const Program& program = call.plan()->program;
    const auto [entry, is_new] = known.try_emplace(program.number.value(), 0);
    if (is_new) {
      const auto before = pairs_.find(entry->first);
      entry->second = before != pairs_.end() ? before->second : computed_pairs(program);
    }
    pairs += entry->second;
  }
  pairs_ = std::move(known);
  return pairs;
}

// Plans the next step if it has documents of its own or begins another stage.
void Training::plan_what_follows() {
  const int64_t next = steps_done_ + 1;
  if (next >= config_.run.steps) return;
  if (!config_.data.documents && stage_at(stages_, next) == stage_) return;
  for (int64_t i = 0; i < stages_[stage_at(stages_, next)].accumulate; ++i) plan_ahead(requests_ahead(next, i));
}

}  // namespace annulus
