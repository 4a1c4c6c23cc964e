// See attention_traffic.h.
#include "runtime/training/attention_traffic.h"

#include <ATen/OpMathType.h>

#include <memory>

#include "attention/plan/plan.h"
#include "attention/plan/traffic.h"
#include "attention/proof/plans.h"
#include "runtime/training/job.h"

namespace annulus {
namespace {

// The rows of K and those of V, or of dK and dV, that a call sends; a row has head_dim elements.
struct RowsSent {
  double keys_and_values = 0, gradients = 0;
};

RowsSent rows_sent(const PlanRequest& request, int rank) {
  if (request.ranks == 1 || is_adaptive(request.pattern)) return {};
  const std::shared_ptr<const RankPlan> plan = cached_plan(request, rank);
  RowsSent sent;
  for (const auto* steps : {&plan->program.forward, &plan->program.backward}) {
    const Traffic rows = traffic(plan->program, *steps);
    sent.keys_and_values += static_cast<double>(rows.kv_rows);
    sent.gradients += static_cast<double>(rows.grad_rows);
  }
  return sent;
}

}  // namespace

AttentionTraffic attention_traffic(const Config& config, const std::vector<Stage>& stages, int rank) {
  const auto head_dim = static_cast<double>(model_shape(config).head_dim());
  const at::ScalarType dtype = compute_dtype(config);
  const double element = head_dim * static_cast<double>(c10::elementSize(dtype));
  const double wide = head_dim * static_cast<double>(c10::elementSize(at::toOpMathType(dtype)));
  AttentionTraffic most;
  for (const Stage& stage : stages) {
    std::vector<RowsSent> distinct;
    for (const PlanRequest& request : stage.layers.of_rows(0, stage.batch / config.mesh.data)) {
      distinct.push_back(rows_sent(request, rank));
    }
    const auto batches = static_cast<double>(stage.accumulate);
    AttentionTraffic sent;
    for (const size_t which : stage.layers.of_layer) {
      sent.keys_and_values += batches * element * distinct[which].keys_and_values;
      sent.gradients += batches * wide * distinct[which].gradients;
    }
    if (sent.total() > most.total()) most = sent;
  }
  return most;
}

}  // namespace annulus
