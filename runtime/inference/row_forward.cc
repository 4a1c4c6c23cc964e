// See row_forward.h.
#include "runtime/inference/row_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "attention/execution/planned_call.h"
#include "attention/execution/terms_in_job.h"
#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "common/text.h"
#include "runtime/model/planned_attention.h"

namespace annulus {
namespace {

// The rotary positions of rows that restart with every document, for these positions of each row: [B * n].
at::Tensor restarted(const std::vector<RowParts>& rows, const std::vector<Span>& positions) {
  std::vector<int64_t> of;
  for (const RowParts& parts : rows) {
    const std::vector<int64_t> of_row = path_positions(parts, positions);
    of.insert(of.end(), of_row.begin(), of_row.end());
  }
  return at::tensor(of, at::kLong);
}

// The requests of these rows.
std::vector<PlanRequest> requests_of(const LayerRequests& layers, const ForwardRows& rows) {
  std::vector<PlanRequest> requests = layers.distinct;
  if (rows.apart) set_documents(requests, rows.parts);
  return requests;
}

}  // namespace

void check_options(const RowOptions& o) {
  if (!o.pattern.empty()) parse_pattern(o.pattern, "--pattern");
  if (o.layout) parse_layout(*o.layout, "--layout");
  parse_schedule(o.schedule, "--schedule");
  parse_kernel(o.kernel, "--kernel");
}

LayerRequests row_requests(const ModelSection& model, const RowOptions& o, int64_t rows, int64_t length, int ranks,
                           bool backward, const char* module) {
  Config config;
  config.model = model;
  if (!o.pattern.empty()) config.model.pattern = parse_pattern(o.pattern, "--pattern");
  config.data.context = length;
  config.data.batch = rows;
  if (o.layout) config.attention.layout = *o.layout;
  config.attention.schedule = o.schedule;
  config.attention.within = o.within;
  config.attention.machine = o.machine;
  config.attention.even = false;
  LayerRequests layers = training_stages(config, ranks)[0].layers;
  for (PlanRequest& request : layers.distinct) {
    PlanTerms terms = *request.terms;
    terms.backward = backward;
    terms.memory = 0;  // what is free is found when the rows are computed
    terms.or_leanest = true;
    request.terms = std::move(terms);
  }
  const Layout layout = row_layout(layers);
  for (int rank = 0; rank < ranks; ++rank) {
    if (layout.count(rank) > 0) continue;
    throw Error(ErrorKind::kPlan, module,
                counted(length, "position") + " give rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                    " none with --layout " + o.layout.value_or("zigzag") + ": use fewer ranks");
  }
  return layers;
}

Layout row_layout(const LayerRequests& layers, const ForwardRows& rows) {
  return query_layout(requests_of(layers, rows)[0]);
}

at::Tensor RowForward::hidden(const LayerRequests& layers, const ForwardRows& rows, const std::string& label,
                              const Around& around) const {
  const Layout layout = row_layout(layers, rows);
  const std::vector<Span>& spans = layout.spans[static_cast<size_t>(ring_.rank())];
  std::vector<PlanRequest> requests = requests_of(layers, rows);
  const at::Device device = model_.parameters().device();
  if (ring_.size() > 1 && requests[0].schedule == ScheduleKind::kAuto) {
    const int64_t least = least_free_bytes(ring_, device, {label + ", looking at free memory"});
    for (PlanRequest& request : requests) request.terms = terms_in_job(request.terms, ring_, least);
  }
  hold_bits(requests, ring_.rank());
  std::vector<PlannedCall> calls;
  for (size_t i = 0; i < layers.of_layer.size(); ++i) {
    AttentionCall call;
    call.request = requests[layers.of_layer[i]];
    call.comm = &ring_;
    call.kernel = kernel_;
    call.softcap = model_.shape().softcap;
    call.sinks = model_.shape().attention_sinks.of(static_cast<int64_t>(i));
    call.scale = model_.shape().attention_scale();
    call.label = label + ", layer " + std::to_string(i);
    calls.emplace_back(std::move(call));
  }
  const Parameters& parameters = model_.parameters();
  plan_calls(calls, {parameters.dtype(), model_.shape().head_dim(), parameters.device().type()},
             {label + ", planning attention"});
  const Attend planned = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                             const at::Tensor& sinks) {
    return attended(q, k, v, calls[static_cast<size_t>(layer)], sinks);
  };
  const Attend wrapped = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer,
                             const at::Tensor& sinks) { return around(planned, q, k, v, layer, sinks); };
  const at::Tensor positions = at::tensor(layout.positions(ring_.rank()), at::kLong);
  const RotaryTables tables = model_.rotary(rows.restart ? restarted(rows.parts, spans) : positions);
  return model_.hidden(rows.tokens.index_select(1, positions).to(parameters.device()), tables,
                       around ? wrapped : planned);
}

}  // namespace annulus
