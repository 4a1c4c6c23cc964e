// See training.h.
#include "training/training.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "attention/plan/layout.h"
#include "attention/plan/proofs.h"
#include "common/checksum.h"
#include "common/error.h"
#include "common/text.h"
#include "device/numerics.h"

namespace annulus {
namespace {

// Elements of one gradient collective: bounds what a backend needs for it beside the gradients themselves.
constexpr int64_t kBucket = int64_t{1} << 24;

// Of Parameters::readout().
constexpr int kLoss = 0;
constexpr int kStop = 1;
constexpr int kNorm = 2;

KernelKind kernel(const Config& c) { return parse_kernel(c.attention.kernel, "attention.kernel"); }

[[noreturn]] void refuse_not_finite(int64_t times, int64_t step) {
  throw Error(ErrorKind::kUsage, "train",
              "the loss or the gradients were not finite in " + counted(times, "step") +
                  (times > 1 ? " in a row, the last at step " : ", at step ") + std::to_string(step) +
                  "; no such update was applied. Lower optimizer.lr or lengthen optimizer.warmup");
}

// Of the global batch, this rank's.
Span rows_of(const Config& c, const Mesh& mesh) {
  const int64_t count = c.data.batch / mesh.size("data");
  return {mesh.index("data") * count, 1, count};
}

// Every step does the same work on the same memory, and waits for no other rank before its gradients are there: the
// context axis has one rank.
bool steps_are_alike(const Config& c, const LayerRequests& layers, const Communicator& world) {
  return world.size() == c.mesh.data && !c.data.documents && c.model.dropout == 0 &&
         std::none_of(layers.distinct.begin(), layers.distinct.end(),
                      [](const PlanRequest& request) { return is_adaptive(request.pattern); });
}

}  // namespace

at::ScalarType compute_dtype(const Config& c) { return c.model.dtype == "bf16" ? at::kBFloat16 : at::kFloat; }

std::vector<MeshAxis> mesh_axes(const Config& c) {
  return {{"data", static_cast<int>(c.mesh.data)}, {"context", static_cast<int>(c.mesh.context)}};
}

OptimizerSettings optimizer_settings(const Config& c) {
  return {.lr = c.optimizer.lr,
          .min_lr_ratio = c.optimizer.min_lr_ratio,
          .warmup = c.optimizer.warmup,
          .steps = c.run.steps,
          .weight_decay = c.optimizer.weight_decay,
          .beta1 = c.optimizer.beta1,
          .beta2 = c.optimizer.beta2,
          .eps = c.optimizer.eps,
          .clip = c.optimizer.clip};
}

LayerRequests check_training(const Config& c, int ranks) {
  validate(model_shape(c));
  if (c.model.vocab < 256) {
    throw Error(ErrorKind::kPlan, "train",
                "model.vocab is " + std::to_string(c.model.vocab) +
                    ", but the tokens of a text are its bytes: it must be at least 256");
  }
  const std::vector<MeshAxis> sizes = fit_axes(mesh_axes(c), ranks);
  const int data = sizes[0].size;
  const int context = sizes[1].size;
  if (c.data.batch % data != 0) {
    const int64_t up = (c.data.batch / data + 1) * data;
    throw Error(ErrorKind::kPlan, "train",
                "a batch of " + counted(c.data.batch, "row") + " cannot be split evenly over " + std::to_string(data) +
                    " data-parallel ranks: use data.batch = " + std::to_string(up) + " or mesh.data = 1");
  }
  kernel(c);
  LayerRequests requests = layer_requests(c, context);
  if (c.data.context < 2 * context) {
    throw Error(ErrorKind::kPlan, "train",
                "data.context is " + std::to_string(c.data.context) + ", too short for " + std::to_string(context) +
                    " ranks: it must be at least " + std::to_string(2 * context));
  }
  return requests;
}

ModelShape model_shape(const Config& c) {
  return {.layers = c.model.layers,
          .dim = c.model.dim,
          .heads = c.model.heads,
          .kv_heads = c.model.kv_heads,
          .ffn = c.model.ffn,
          .vocab = c.model.vocab,
          .rope_theta = c.model.rope_theta,
          .tie_embeddings = c.model.tie_embeddings,
          .norm_eps = c.model.norm_eps};
}

void add_training_charges(const Config& c, int64_t rows, int64_t positions, int ranks, bool gpu, StepCharges& step) {
  const ModelShape shape = model_shape(c);
  const at::ScalarType dtype = compute_dtype(c);
  const auto wide = static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)));
  const int64_t count = parameter_count(shape), tokens = 2 * rows * positions * 8;
  for (const Charge& charge : parameter_charges(count, dtype)) step.lasts(charge);
  step.lasts(optimizer_charge(count, dtype));
  step.lasts({"inputs", tokens + positions * shape.head_dim() * wide, When::kLasts});  // and the rotary table
  if (!gpu) step.lasts({"positions", positions * 8, When::kLasts});
  // As many rows as it takes one after the other, each with the token that follows it.
  const int64_t loading = gpu ? 0 : tokens + (c.data.context + 1 + positions) * 8;
  const int64_t bucket = ranks > 1 ? std::min(kBucket, count) * wide : 0;
  step.then({"batch",
             {{"rows that are loaded", loading, When::kForward}, {"a collective's bucket", bucket, When::kBackward}}});
  // A recorded step keeps its memory (step_graph.h): what a validation takes comes besides.
  const bool recorded = gpu && c.cuda_graphs == "auto" && ranks == c.mesh.data;
  const bool validated = c.validation.every > 0 && c.validation.batches > 0 && c.data.validation_fraction > 0;
  const int64_t validation = recorded && validated ? forward_bytes(shape, rows * positions, {dtype, gpu}) : 0;
  step.lasts({"validation", validation, When::kLasts});
}

void restore_tensors(const TrainingState& state, const std::vector<NamedTensor>& into) {
  std::map<std::string_view, const at::Tensor*> saved;
  for (const NamedTensor& t : state.tensors) saved[t.name] = &t.tensor;
  const std::string hint = "; was it made with another [model]?";
  for (const NamedTensor& to : into) {
    const auto found = saved.find(to.name);
    if (found == saved.end()) throw Error(ErrorKind::kInput, "checkpoint", "it holds no tensor " + to.name + hint);
    const at::Tensor& from = *found->second;
    if (from.sizes() != to.tensor.sizes() || from.scalar_type() != to.tensor.scalar_type()) {
      throw Error(ErrorKind::kInput, "checkpoint",
                  to.name + " is " + c10::str(from.scalar_type(), " ", list_text(from.sizes())) +
                      ", but the configuration needs " +
                      c10::str(to.tensor.scalar_type(), " ", list_text(to.tensor.sizes())) + hint);
    }
  }
  for (const NamedTensor& to : into) at::Tensor(to.tensor).copy_(*saved[to.name]);
}

Training::Training(const Config& config, LayerRequests layers, Communicator& world, const TextSource& text,
                   at::Device device)
    : config_(config),
      layers_(std::move(layers)),
      text_(text),
      mesh_(world, mesh_axes(config)),
      rows_(rows_of(config, mesh_)),
      requests_(layers_.of_rows(rows_.begin, rows_.count)),
      device_(device),
      model_(model_shape(config), static_cast<uint64_t>(config.run.seed), compute_dtype(config), device),
      optimizer_(model_.parameters(), optimizer_settings(config)),
      graph_(device, config.cuda_graphs == "auto" && steps_are_alike(config, layers_, world)),
      readout_({Parameters::kReadout}, model_.parameters().readout().scalar_type(), device) {
  if (device.is_cuda()) set_gpu_numerics({.tf32 = config.tf32, .deterministic = config.deterministic});
  model_.set_recompute(config.model.recompute);
  const Layout layout = make_layout(parse_layout(config.attention.layout, "attention.layout"), config.data.context,
                                    mesh_.size("context"));
  std::vector<int64_t> mine = layout.positions(mesh_.index("context"));
  positions_ = at::from_blob(mine.data(), {static_cast<int64_t>(mine.size())}, at::kLong).clone();
  rotary_ = model_.rotary(positions_);
  batch_ = at::empty({2, rows_.count, positions_.numel()}, at::TensorOptions(at::kLong).device(device));
  // What is wrong with a plan is said before the first step. Those of later documents are proved where they are made,
  // ahead of their step; adaptive ones by the calls that make them.
  for (const PlanRequest& request : requests([&](int64_t row) { return text_.sample_documents(0, row); })) {
    if (proves_by_default()) prove_plan(request, mesh_.axis("context"));
  }
}

template <typename Documents>
std::vector<PlanRequest> Training::requests(const Documents& documents) const {
  std::vector<PlanRequest> requests = requests_;
  if (!config_.data.documents) return requests;
  std::vector<std::vector<int64_t>> mine;
  for (int64_t i = 0; i < rows_.count; ++i) mine.push_back(documents(rows_.at(i)));
  for (PlanRequest& request : requests) request.pattern.documents = mine;
  return requests;
}

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

Attend Training::attend(const std::vector<PlanRequest>& requests, const Dropout& dropout, const std::string& when) {
  std::vector<AttentionCall> calls;
  for (size_t i = 0; i < layers_.of_layer.size(); ++i) {
    AttentionCall call;
    call.request = requests[layers_.of_layer[i]];
    call.comm = &mesh_.axis("context");
    call.kernel = kernel(config_);
    call.dropout = dropout;
    call.dropout.layer = static_cast<int64_t>(i);
    call.label = when + ", attention, layer " + std::to_string(i);
    calls.push_back(std::move(call));
  }
  return [calls = std::move(calls)](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t layer) {
    return attention(q, k, v, calls[static_cast<size_t>(layer)]);
  };
}

std::string Training::attention_text() const {
  std::string text;
  for (const PlanRequest& request : layers_.distinct) text += (text.empty() ? "" : "; ") + request.text();
  return text;
}

double Training::flops_per_token() const { return annulus::flops_per_token(model_.shape(), layers_.pairs_per_token()); }

template <typename Row>
void Training::load_batch(const Row& row) {
  const at::Tensor next = positions_.add(1);
  std::vector<at::Tensor> rows(static_cast<size_t>(2 * rows_.count));
  for (int64_t i = 0; i < rows_.count; ++i) {
    const at::Tensor tokens = row(rows_.at(i));
    rows[static_cast<size_t>(i)] = tokens.index_select(0, positions_);
    rows[static_cast<size_t>(rows_.count + i)] = tokens.index_select(0, next);
  }
  const at::Tensor host = host_side(batch_);
  at::Tensor flat = host.view({2 * rows_.count, positions_.numel()});
  at::stack_out(flat, rows);
  check_tokens(host, config_.model.vocab);
  send(host, batch_);
}

at::Tensor Training::loss(const Attend& attend) const {
  return model_.loss(batch_[0], batch_[1].view({-1}), rotary_, attend, 1.0 / static_cast<double>(tokens_per_step()));
}

void Training::forward_backward(const Attend& attend) {
  Parameters& parameters = model_.parameters();
  parameters.zero_leaf_gradients();
  const c10::AutoGradMode grad(true);
  const at::Tensor local = loss(attend);
  local.backward();
  parameters.gather_gradients();
  parameters.readout()[kLoss].copy_(local.detach());
}

std::array<double, Parameters::kReadout> Training::read_out() {
  readout_.start(model_.parameters().readout());
  // Other ranks may have failed: progress() raises what the communication met.
  while (mesh_.world().size() > 1 && !readout_.ready()) {
    mesh_.progress();
    std::this_thread::yield();
  }
  const at::Tensor& values = readout_.wait();
  mesh_.progress();
  std::array<double, Parameters::kReadout> result{};
  for (int i = 0; i < Parameters::kReadout; ++i) result[static_cast<size_t>(i)] = values[i].item<double>();
  return result;
}

StepResult Training::step(bool stop) {
  Parameters& parameters = model_.parameters();
  at::Tensor& reduced = parameters.reduced();
  const auto planned = [&](int64_t step) {
    return requests([&, step](int64_t row) { return text_.sample_documents(step, row); });
  };
  const std::vector<PlanRequest> now = planned(steps_done_);
  look_up(now);
  if (config_.data.documents && steps_done_ + 1 < config_.run.steps) plan_ahead(planned(steps_done_ + 1));
  const Dropout dropout{.rate = config_.model.dropout,
                        .seed = static_cast<uint64_t>(config_.run.seed),
                        .step = steps_done_,
                        .layer = 0,
                        .first_row = rows_.begin};
  load_batch([&](int64_t row) { return text_.sample(steps_done_, row); });
  graph_.run([&] { forward_backward(attend(now, dropout, "step " + std::to_string(steps_done_ + 1))); });
  parameters.readout()[kStop].fill_(stop ? 1 : 0);
  Communicator& world = mesh_.world();
  if (world.size() > 1) {
    for (int64_t begin = 0; begin < reduced.numel(); begin += kBucket) {
      at::Tensor bucket = reduced.narrow(0, begin, std::min(kBucket, reduced.numel() - begin));
      world.all_reduce(bucket, ReduceOp::kSum, {"gradients", steps_done_ + 1, "step"});
    }
  }
  parameters.readout()[kNorm].copy_(optimizer_.gradient_norm());
  const auto read = read_out();
  StepResult result;
  result.loss = read[kLoss];
  result.stop = read[kStop] > 0;
  result.gradient_norm = read[kNorm];
  result.note = graph_.take_note();
  result.lr = learning_rate(optimizer_settings(config_), steps_done_);
  result.applied = std::isfinite(result.loss) && std::isfinite(result.gradient_norm);
  if (result.applied) {
    optimizer_.update(result.gradient_norm, steps_done_);
    not_finite_ = 0;
    ++applied_;
  } else if (++not_finite_ >= config_.optimizer.skips) {
    refuse_not_finite(not_finite_, steps_done_ + 1);
  }
  ++steps_done_;
  return result;
}

void Training::require_updates() const {
  if (not_finite_ > 0 && not_finite_ >= applied_) refuse_not_finite(not_finite_, steps_done_);
}

ValidationResult Training::validate(const std::function<bool()>& stop) {
  const c10::AutoGradMode no_grad(false);
  const int64_t batches = config_.validation.batches;
  const int64_t rows = batches * config_.data.batch;
  double total = 0;
  for (int64_t i = 0; i < batches; ++i) {
    const bool stop_now = stop();
    const auto planned = [&](int64_t which) {
      return requests([&](int64_t row) { return text_.validation_documents(which * config_.data.batch + row, rows); });
    };
    const std::vector<PlanRequest> now = planned(i);
    look_up(now);
    if (config_.data.documents && i + 1 < batches) plan_ahead(planned(i + 1));
    load_batch([&](int64_t row) { return text_.validation_row(i * config_.data.batch + row, rows); });
    const at::Tensor local = loss(attend(now, {}, "validation, batch " + std::to_string(i + 1)));
    at::Tensor sums = at::stack({local, at::full_like(local, stop_now ? 1 : 0)});
    if (mesh_.world().size() > 1) mesh_.world().all_reduce(sums, ReduceOp::kSum, {"validation loss", i + 1, "batch"});
    sums = sums.to(at::kCPU, at::kDouble);
    total += sums[0].item<double>();
    if (sums[1].item<double>() > 0) return {0, true};
  }
  return {total / static_cast<double>(batches), false};
}

TrainingState Training::state() const {
  const Parameters& p = model_.parameters();
  TrainingState state{.step = steps_done_, .tensors = p.views(p.values()), .extra = {}};
  for (const NamedTensor& t : p.views(optimizer_.exp_avg(), "optimizer.exp_avg.")) state.tensors.push_back(t);
  for (const NamedTensor& t : p.views(optimizer_.exp_avg_sq(), "optimizer.exp_avg_sq.")) state.tensors.push_back(t);
  state.extra["updates"] = std::to_string(optimizer_.updates());
  state.extra["text"] = text_.fingerprint();
  state.extra["seed"] = std::to_string(config_.run.seed);
  return state;
}

void Training::restore(const TrainingState& state) {
  const auto updates = state.extra.find("updates");
  int64_t count = -1;
  try {
    if (updates != state.extra.end()) count = std::stoll(updates->second);
  } catch (const std::exception&) {
    count = -1;
  }
  if (count < 0 || count > state.step || state.step < 0) {
    throw Error(ErrorKind::kInput, "checkpoint", "it does not say how many updates were made");
  }
  restore_tensors(state, this->state().tensors);
  model_.parameters().refresh_leaves();
  optimizer_.set_updates(count);
  steps_done_ = state.step;
}

std::string Training::weights_digest() const {
  const at::Tensor values = model_.parameters().values().cpu().contiguous();
  return checksum(values.const_data_ptr(), values.nbytes());
}

}  // namespace annulus
