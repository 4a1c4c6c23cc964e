// What attention sends in a training step: keys and values, and their gradients; see fitting.h.
#include <ATen/OpMathType.h>

#include <memory>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "attention/proof/plans.h"
#include "runtime/training/fitting.h"
#include "runtime/training/job.h"
#include "runtime/training/mask_bits.h"

namespace annulus {
namespace {

// What a call sends. `element` and `wide` are the bytes of an element of the inputs and of a sum.
AttentionTraffic sent_by(const PlanRequest& request, int rank, int64_t head_dim, int64_t element, int64_t wide) {
  if (request.ranks == 1 || is_adaptive(request.pattern)) return {};
  const std::shared_ptr<const RankPlan> plan = cached_plan(request, rank);
  AttentionTraffic sent;
  for (const auto* steps : {&plan->program.forward, &plan->program.backward}) {
    const Traffic rows = traffic(plan->program, *steps);
    sent.keys_and_values += static_cast<double>(head_dim * element * rows.kv_rows);
    sent.gradients += static_cast<double>(head_dim * wide * rows.grad_rows);
    sent.queries += static_cast<double>(rows.bytes(head_dim, element, wide));
  }
  sent.queries -= sent.keys_and_values + sent.gradients;
  return sent;
}

}  // namespace

AttentionTraffic attention_traffic(const Config& config, const std::vector<Stage>& stages, int rank) {
  const int64_t head_dim = model_shape(config).head_dim();
  const at::ScalarType dtype = compute_dtype(config);
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  AttentionTraffic most;
  for (const Stage& stage : stages) {
    std::vector<AttentionTraffic> distinct;
    for (const PlanRequest& request : plannable_rows(stage.layers, stage.batch / config.mesh.data, rank)) {
      distinct.push_back(sent_by(request, rank, head_dim, element, wide));
    }
    const auto batches = static_cast<double>(stage.accumulate);
    AttentionTraffic sent;
    for (const size_t which : stage.layers.of_layer) {
      sent.keys_and_values += batches * distinct[which].keys_and_values;
      sent.gradients += batches * distinct[which].gradients;
      sent.queries += batches * distinct[which].queries;
    }
    if (sent.total() > most.total()) most = sent;
  }
  return most;
}

}  // namespace annulus
