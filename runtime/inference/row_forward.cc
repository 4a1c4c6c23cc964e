// See row_forward.h.
#include "runtime/inference/row_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/execution/planned_call.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/choice.h"
#include "common/error.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "runtime/model/decoder_layer.h"
#include "runtime/model/planned_attention.h"
#include "runtime/training/mask_bits.h"
#include "runtime/training/memory_plan.h"
#include "runtime/training/run_memory.h"

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
  if (o.layout) parse_layout_or_auto(*o.layout, "--layout");
  parse_schedule(o.schedule, "--schedule");
  parse_kernel(o.kernel, "--kernel");
}

namespace {

Config row_config(const ModelSection& model, const RowOptions& o, const RowShape& shape) {
  Config config;
  config.model = model;
  if (!o.pattern.empty()) config.model.pattern = parse_pattern(o.pattern, "--pattern");
  config.data.context = shape.length;
  config.data.batch = shape.rows;
  config.data.documents = shape.apart;
  if (o.layout) config.attention.layout = *o.layout;
  config.attention.schedule = o.schedule;
  config.attention.within = o.within;
  config.attention.machine = o.machine;
  config.attention.even = false;
  return config;
}

void require_positions(const LayerRequests& layers, const char* module) {
  const PlanRequest& request = layers.distinct[0];
  const Layout layout = row_layout(layers);
  for (int rank = 0; rank < request.ranks; ++rank) {
    if (layout.count(rank) > 0) continue;
    throw Error(ErrorKind::kPlan, module,
                counted(request.shape.q_len, "position") + " give rank " + std::to_string(rank) + " of " +
                    std::to_string(request.ranks) + " none with --layout " + std::string(to_string(request.layout)) +
                    ": use fewer ranks");
  }
}

}  // namespace

LayerRequests row_requests(const ModelSection& model, const RowOptions& o, const RowShape& shape, int ranks,
                           bool backward, const char* module) {
  LayerRequests layers = training_stages(row_config(model, o, shape), ranks)[0].layers;
  for (PlanRequest& request : layers.distinct) {
    PlanTerms terms = *request.terms;
    terms.backward = backward;
    request.terms = std::move(terms);
  }
  require_positions(layers, module);
  return layers;
}

int64_t row_forward_bytes(const ModelShape& s, const LayerRequests& layers, int64_t rows, int rank, KernelKind kernel,
                          const Computes& on) {
  int64_t most = 0;
  const CallTraits call{s.head_dim(), on.dtype, on.gpu, /*dropout=*/false, s.softcap > 0};
  for (const AttentionCharges& of : layer_charges(layers, rows, rank, kernel, call, s.attention_sinks)) {
    int64_t bytes = 0;
    for (const Charge& charge : of.part.charges) {
      // The output is a part of the layer's.
      if (charge.when != When::kBackward && charge.what != "out") bytes += charge.bytes;
    }
    most = std::max(most, bytes);
  }
  return layer_forward_bytes(s, rows, row_layout(layers).count(rank), on) + most;
}

const LayerRequests& RowChoices::of(const RowShape& shape) {
  if (const auto found = known_.find(shape); found != known_.end()) return found->second;
  const ModelSection& model = settings_.model;
  const RowOptions& options = settings_.options;
  const char* const module = settings_.module;
  const std::string doing = std::string(module) + ", choosing the attention";
  const Config config = row_config(model, options, shape);
  std::vector<Stage> stages = {
      {.context = shape.length,
       .batch = shape.rows,
       .layers = row_requests(model, options, shape, world_.size(), settings_.backward, module)}};
  const RunChoice choice = choose_for_run(
      stages, config, settings_.device.is_cuda() ? "cuda" : "cpu", world_.hosts(),
      [&](const std::vector<Stage>& tried) {
        return most_lacking(world_, {doing}, [&]() -> std::optional<int64_t> {
          if (!settings_.free) return std::nullopt;
          const double lacks = settings_.bytes(tried[0].layers, shape) - *settings_.free;
          return static_cast<int64_t>(std::ceil(std::min(lacks, kAnyMachine)));
        });
      },
      "");
  let_calls_choose(stages, config);
  require_positions(stages[0].layers, module);
  for (const std::string& line : choice.lines) {
    if (world_.rank() == 0) log_debug(module, line);
  }
  return known_[shape] = std::move(stages[0].layers);
}

Layout row_layout(const LayerRequests& layers, const ForwardRows& rows) {
  return query_layout(requests_of(layers, rows)[0]);
}

at::Tensor RowForward::hidden(const LayerRequests& layers, const ForwardRows& rows, const std::string& label,
                              const Around& around) const {
  const Layout layout = row_layout(layers, rows);
  const std::vector<Span>& spans = layout.spans[static_cast<size_t>(ring_.rank())];
  std::vector<PlanRequest> requests = requests_of(layers, rows);
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
