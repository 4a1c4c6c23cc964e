// The attention of a step: plans, the calls of each layer, and the agreement of the ranks on them. See training.h.
#include <string>
#include <utility>
#include <vector>

#include "attention/execution/agreed_calls.h"
#include "attention/execution/attention.h"
#include "attention/proof/proofs.h"
#include "runtime/training/job.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

KernelKind kernel(const Config& c) { return parse_kernel(c.attention.kernel, "attention.kernel"); }

}  // namespace

void Training::look_up(const std::vector<PlanRequest>& requests) {
  for (const PlanRequest& request : requests) {
    if (!is_adaptive(request.pattern)) cached_program(request, mesh_.index("context"));
  }
}

void Training::plan_ahead(const std::vector<PlanRequest>& requests) {
  for (const PlanRequest& request : requests) {
    if (is_adaptive(request.pattern)) continue;
    if (proves_by_default()) {
      plan_and_prove_ahead(request, mesh_.index("context"));
    } else {
      annulus::plan_ahead(request, mesh_.index("context"));
    }
  }
}

std::vector<AttentionCall> Training::calls(const std::vector<PlanRequest>& requests, const Dropout& dropout,
                                           const std::string& when) {
  std::vector<AttentionCall> calls;
  const std::vector<size_t>& of_layer = stages_[stage_].layers.of_layer;
  for (size_t i = 0; i < of_layer.size(); ++i) {
    AttentionCall call;
    call.request = requests[of_layer[i]];
    call.comm = &mesh_.axis("context");
    call.kernel = kernel(config_);
    call.dropout = dropout;
    call.dropout.layer = static_cast<int64_t>(i);
    call.label = when + ", attention, layer " + std::to_string(i);
    // Gradients and weights are being transferred meanwhile.
    if (mesh_.world().size() > 1) call.poll = [this] { progress(); };
    calls.push_back(std::move(call));
  }
  return calls;
}

void Training::agree_on(std::vector<std::vector<AttentionCall>>& batches, OpLabel label) const {
  std::vector<AttentionCall*> all;
  for (std::vector<AttentionCall>& calls : batches) {
    for (AttentionCall& call : calls) all.push_back(&call);
  }
  agree_ahead(all, {compute_dtype(config_), config_.model.head_dim(), device_.type()}, label);
}

Attend Training::attend(std::vector<AttentionCall> calls) {
  return [calls = std::move(calls)](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
    return attention(q, k, v, calls[static_cast<size_t>(layer)]);
  };
}

// Plans the next step if it has documents of its own or begins another stage.
void Training::plan_what_follows() {
  const int64_t next = steps_done_ + 1;
  if (next >= config_.run.steps) return;
  if (!config_.data.documents && stage_at(stages_, next) == stage_) return;
  for (int64_t i = 0; i < stages_[stage_at(stages_, next)].accumulate; ++i) plan_ahead(requests_ahead(next, i));
}

}  // namespace annulus
