// See training.h.
#include "runtime/training/training.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "attention/plan/layout.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "common/trace/recorder.h"
#include "memory/upload.h"
#include "runtime/tasks/task.h"
#include "runtime/training/gpu_precision.h"
#include "runtime/training/mask_bits.h"
#include "runtime/training/offload_config.h"
#include "runtime/training/state/learning_rate.h"
#include "runtime/training/state/state_tier.h"
#include "runtime/training/training_charges.h"
#include "runtime/training/training_share.h"

namespace annulus {
namespace {

// Returns where optimizer.offload puts the state; null without it. Collective.
std::unique_ptr<TieredTensors> make_tier(const Config& config, Communicator& world, const StateTier& state,
                                         TieredTensors::Settings settings) {
  settings.dtype = at::toOpMathType(settings.dtype);
  std::unique_ptr<TieredTensors> tier;
  if (config.optimizer.offload == "none") return tier;
  together(world, {"preparing the offload"}, [&] { tier = make_optimizer_tier(config, state, settings); });
  return tier;
}

// The numbers that each rank contributes to a step.
constexpr int kLoss = 0;     // its part of the loss, divided by the number of all tokens
constexpr int kStop = 1;     // whether it was asked to stop
constexpr int kTargets = 2;  // its number of targets that count
constexpr int kSquares = 3;  // the sum of squares of its shard of the gradients
constexpr int kWeight = 4;   // the sum of the weights of its targets

// Returns this rank's rows of a batch.
Span rows_of(int64_t batch, const Mesh& mesh) {
  const int64_t count = batch / mesh.size("data");
  return {mesh.index("data") * count, 1, count};
}

void set_documents(std::vector<PlanRequest>& requests, const std::vector<DrawnRow>& rows) {
  std::vector<RowParts> parts;
  for (const DrawnRow& row : rows) parts.push_back(row.parts());
  set_documents(requests, parts);
}

}  // namespace

Training::Training(const Config& config, std::vector<Stage> stages, Communicator& world, const Dataset& data,
                   at::Device device, const Sharding& sharding, int64_t chunk)
    : config_(config),
      stages_(std::move(stages)),
      data_(data),
      mesh_(world, mesh_axes(config)),
      device_(device),
      recorded_(device.is_cuda() &&
                std::all_of(stages_.begin(), stages_.end(),
                            [&](const Stage& s) { return may_be_recorded(config, s, sharding, world.size()); })),
      model_(model_shape(config), compute_dtype(config), device, Model::Unheld{sharding.shards}),
      tier_(make_tier(config, world, state_tier(model_.parameters(), state_traits(config, sharding, recorded_), chunk),
                      {compute_dtype(config), device, chunk})),
      model_state_(model_, world, state_traits(config, sharding, recorded_), static_cast<uint64_t>(config.run.seed),
                   tier_.get()),
      optimizer_(model_state_.updated(), optimizer_settings(config), tier_.get()),
      spikes_(config.optimizer.spike, config.optimizer.spike_window),
      left_out_(config.optimizer.skips),
      numbers_(at::zeros({kNumbers}, at::TensorOptions(at::kDouble).device(device))),
      everybodys_(at::zeros({world.size(), kNumbers}, numbers_.options())),
      readout_({world.size(), kNumbers}, at::kDouble, device),
      uses_(data.resumed_uses()) {
  if (data.vocab() != config.model.vocab) {
    throw Error(ErrorKind::kInternal, "train", "the data were opened for another vocabulary than model.vocab");
  }
  if (device.is_cuda()) set_gpu_precision({.tf32 = config.tf32, .deterministic = config.deterministic});
  model_.set_recompute(config.model.recompute);
  model_.set_kept(&kept_);
  if (config.memory.offload != "none") {
    together(world, {"preparing the offload"},
             [&] { offload_ = make_offload(config, world, device, tier_ ? tier_->in_host_memory() : 0); });
    model_.set_offload(offload_.get());
  }
  require_tasks();
  for (Stage& s : stages_) hold_bits(config, s.layers, rows_of(s.batch, mesh_), mesh_.index("context"));
  const int64_t first = data_.first_step();
  enter(stage_at(stages_, first), first);
}

Training::~Training() = default;

void Training::require_stage(int64_t step) {
  if (const size_t stage = stage_at(stages_, step); stage != stage_) enter(stage, step);
}

void Training::stop_reading() {
  if (!share_ || !share_->reader) return;
  waited_for_data_ += share_->reader->waited();
  share_->reader.reset();
}

void Training::enter(size_t stage, int64_t step) {
  const LongPhase lasts;
  const Stage& now = stages_[stage];
  stop_reading();
  share_.reset();  // before the next one takes its memory
  stage_ = stage;
  const auto rank = static_cast<size_t>(mesh_.index("context"));
  const Span rows = rows_of(now.batch, mesh_);
  const std::vector<PlanRequest> placed = {now.layers.of_rows(rows.begin, rows.count)[0]};
  const Layout layout = query_layout(placed[0]);
  BatchShape shape{.rows = now.batch,
                   .first_row = rows.begin,
                   .own_rows = rows.count,
                   .positions = layout.spans[rank],
                   .restart = config_.data.positions == "restart",
                   .weighs = data_.weighs_targets()};
  if (layout_follows_documents(config_)) {
    shape.place = [placed, rank](const std::vector<DrawnRow>& own) {
      std::vector<PlanRequest> requests = placed;
      set_documents(requests, own);
      return query_layout(requests[0]).spans[rank];
    };
  }
  const at::Tensor positions = shape.rotary() ? at::arange(now.context, at::kLong)
                                              : at::tensor(layout.positions(static_cast<int>(rank)), at::kLong);
  share_ = std::make_unique<Share>(now.accumulate, now.layers, std::move(shape), model_.rotary(positions), recorded_,
                                   device_);
  // Plans are made and proved before the stage's first step, so that errors appear early. Plans of later documents are
  // proved when they are made, ahead of their step, and adaptive ones by the calls that make them.
  plan(calls(requests_ahead(step, 0), {}, "step " + std::to_string(step + 1)),
       {"planning attention", step + 1, "step"});
}

std::vector<PlanRequest> Training::requests(const std::vector<DrawnRow>& rows) const {
  std::vector<PlanRequest> requests = share_->requests;
  if (config_.data.documents) set_documents(requests, rows);
  return requests;
}

std::vector<PlanRequest> Training::requests_ahead(int64_t step, int64_t i) const {
  const Stage& stage = stages_[stage_at(stages_, step)];
  const Span rows = rows_of(stage.batch, mesh_);
  std::vector<PlanRequest> requests = stage.layers.of_rows(rows.begin, rows.count);
  if (!config_.data.documents) return requests;
  std::vector<DrawnRow> drawn;
  for (int64_t row = 0; row < rows.count; ++row) drawn.push_back(data_.drawn(step, i * stage.batch + rows.at(row)));
  set_documents(requests, drawn);
  return requests;
}

std::string Training::attention_text() const {
  std::string text;
  for (const Stage& stage : stages_) {
    for (const PlanRequest& request : stage.layers.distinct) text += (text.empty() ? "" : "; ") + request.text();
  }
  return text;
}

double Training::flops_per_token() const {
  return annulus::flops_per_token(model_.shape(), stages_[stage_].layers.pairs_per_token());
}

double Training::waited_for_data() const { return waited_for_data_ + (share_->reader ? share_->reader->waited() : 0); }

std::optional<OffloadStats> Training::offloaded() const {
  if (!offload_ && !tier_) return std::nullopt;
  OffloadStats all = offload_ ? offload_->stats() : OffloadStats{};
  if (tier_) all += tier_->stats();
  return all;
}

bool Training::replays() const { return share_->graph.recorded(); }

at::Tensor Training::loss(const at::Tensor& batch, const RotaryTables& tables, const Attend& attend) const {
  const Stage& now = stages_[stage_];
  const double scale = 1.0 / static_cast<double>(now.tokens());
  return model_.loss(batch[0], batch[1].reshape({-1}), tables, attend, scale, share_->weights(batch));
}

void Training::progress() {
  mesh_.progress();
  model_state_.progress();
}

std::vector<std::array<double, Training::kNumbers>> Training::read_out() {
  Communicator& world = mesh_.world();
  if (world.size() > 1) {
    world.all_gather(everybodys_, numbers_, {"exchanging step results", steps_done_ + 1, "step"});
  } else {
    everybodys_[0].copy_(numbers_);
  }
  readout_.start(everybodys_);
  // On a GPU this waits for kernels and transfers, which may wait for other ranks.
  std::optional<RankWait> waits;
  if (device_.is_cuda()) waits.emplace();
  // Other ranks may have failed; progress() raises the errors that the communication has met.
  while (world.size() > 1 && !readout_.ready()) {
    progress();
    std::this_thread::yield();
  }
  const at::Tensor& values = readout_.wait();
  progress();
  std::vector<std::array<double, kNumbers>> numbers(static_cast<size_t>(world.size()));
  const double* from = values.const_data_ptr<double>();
  for (auto& of_rank : numbers) std::copy_n(std::exchange(from, from + kNumbers), kNumbers, of_rank.begin());
  return numbers;
}

template <typename Read>
auto Training::read_for(OpLabel agreement, const Read& read) {
  try {
    return read();
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    agree_together(mesh_.axis("context"), agreement, [&]() -> Terms { std::rethrow_exception(failure); });
    throw;  // not reached: agree_together raises what the function raises
  }
}

StepResult Training::step(bool stop, const std::function<Carried()>& carry) {
  beat_step(steps_done_ + 1);
  const TraceSpan span(TraceKind::kPhase, "step", with_commas(steps_done_ + 1));
  require_stage(steps_done_);
  Share& share = *share_;
  const Stage& now = stages_[stage_];
  if (!share.reader || share.next != steps_done_ || share.next == share.end) {
    const int64_t end = stage_ + 1 < stages_.size() ? stages_[stage_ + 1].step : config_.run.steps;
    share.read(data_, now.accumulate, steps_done_, std::max(end, steps_done_ + 1));
  }
  const OpLabel agreement{"agreeing on attention", steps_done_ + 1, "step"};
  const BatchReader::Step& read = *read_for(agreement, [&] {
    const BatchReader::Step* taken = &share.reader->take();
    ++share.next;
    plan_what_follows();  // looks up rows as well
    return taken;
  });
  const at::Tensor& slot = share.slots[read.slot];

  numbers_.zero_();
  const std::string when = "step " + std::to_string(steps_done_ + 1);
  int64_t targets = 0;
  double weight = 0;
  std::vector<std::vector<PlannedCall>> batches;
  std::vector<PlannedCall> all;
  for (int64_t i = 0; i < now.accumulate; ++i) {
    const Batch& batch = read.batches[static_cast<size_t>(i)];
    targets += batch.targets;
    weight += batch.weight;
    const Dropout dropout{.rate = config_.model.dropout,
                          .seed = static_cast<uint64_t>(config_.run.seed),
                          .step = steps_done_,
                          .layer = 0,
                          .first_row = i * now.batch + share.shape.first_row};
    batches.push_back(calls(requests(batch.rows), dropout, when));
    all.insert(all.end(), batches.back().begin(), batches.back().end());
  }
  plan(all, agreement);
  work_.tokens += now.accumulate * share.shape.plane();
  work_.pairs += planned_pairs(all);
  for (int64_t i = 0; i < now.accumulate; ++i) {
    const at::Tensor host = slot[i];
    const at::Tensor on_device = share.on_device(host);
    const Attend attends = attend(std::move(batches[static_cast<size_t>(i)]));
    model_state_.begin_pass(steps_done_ + 1, i == 0, i + 1 == now.accumulate);
    share.graph.run([&] {
      const c10::AutoGradMode grad(true);
      at::Tensor local;
      {
        const TraceSpan forward(TraceKind::kPhase, "forward");
        local = loss(on_device, share.tables(on_device), attends);
      }
      const TraceSpan backward(TraceKind::kPhase, "backward");
      local.backward();
      numbers_[kLoss].add_(local.detach());
    });
    model_state_.end_pass();
  }
  numbers_[kStop].fill_(stop ? 1 : 0);
  numbers_[kTargets].fill_(targets);
  numbers_[kWeight].fill_(weight);
  numbers_[kSquares].copy_(model_state_.squares());
  if (carry) {
    Carried carried = carry();
    const at::Tensor host = at::from_blob(carried.data(), {kCarriedNumbers}, at::kDouble);
    numbers_.narrow(0, kOwnNumbers, kCarriedNumbers).copy_(upload(host, device_));
  }
  const auto numbers = read_out();
  model_state_.finish_gradients();
  compare_copies(config_, model_state_, mesh_.world(), steps_done_ + 1);

  // Sums are taken in rank order. The shards of the first replica are the whole gradients.
  double loss = 0, squares = 0;
  StepResult result;
  for (size_t rank = 0; rank < numbers.size(); ++rank) {
    loss += numbers[rank][kLoss];
    result.targets += static_cast<int64_t>(numbers[rank][kTargets]);
    result.weight += numbers[rank][kWeight];
    result.stop = result.stop || numbers[rank][kStop] > 0;
    if (model_state_.sharding().replica_of(static_cast<int>(rank)) == 0) squares += numbers[rank][kSquares];
  }
  result.tokens = now.tokens();
  // Up to here, gradients and loss are sums divided by the number of tokens.
  const double per_weight = result.weight > 0 ? static_cast<double>(result.tokens) / result.weight : 0;
  result.loss = loss * per_weight;
  result.gradient_norm = std::sqrt(squares) * per_weight;
  result.note = share.graph.take_note();
  result.lr = learning_rate(optimizer_settings(config_), steps_done_);
  for (const auto& of_rank : numbers) {
    std::copy_n(of_rank.begin() + kOwnNumbers, kCarriedNumbers, result.carried.emplace_back().begin());
  }
  apply(per_weight, result);
  for (size_t i = 0; i < uses_.size(); ++i) uses_[i].add(read.uses[i]);
  tokens_ += result.tokens;
  ++steps_done_;
  return result;
}

void Training::apply(double gradient_scale, StepResult& result) {
  const auto leave_out = [&](const std::string& why, LeftOut::Reason reason) {
    result.note += (result.note.empty() ? "step " : "; step ") + with_commas(steps_done_ + 1) + ": " + why;
    left_out_.add(steps_done_, reason);
  };
  const std::string left_out = ", so this update is left out";
  const bool sound = result.targets > 0 && std::isfinite(result.loss) && std::isfinite(result.gradient_norm);
  result.median = spikes_.median();
  result.spike = sound && spikes_.is_spike(result.gradient_norm);
  const double divisor = gradient_divisor(optimizer_settings(config_), gradient_scale, result.gradient_norm);
  const double largest = largest_divisor(config_.model.dtype == "fp64" ? at::kDouble : at::kFloat);
  result.applied = sound && !result.spike && divisor <= largest;
  if (result.applied) {
    const TraceSpan span(TraceKind::kCompute, "update");
    optimizer_.update(gradient_scale, result.gradient_norm, steps_done_);
    model_state_.changed();
    spikes_.applied(result.gradient_norm);
    left_out_.applied(steps_done_);
  } else if (result.spike) {
    spikes_.left_out();
    leave_out("the gradient norm " + significant(result.gradient_norm, 3) + " is above " +
                  exact(config_.optimizer.spike) + " times its running median " + significant(*result.median, 3) +
                  (config_.optimizer.spike_action == "skip" ? left_out : ""),
              LeftOut::Reason::kSpike);
  } else if (sound) {
    leave_out("the gradient norm " + significant(result.gradient_norm, 3) + " is more than " + significant(largest, 3) +
                  " times optimizer.clip = " + exact(config_.optimizer.clip) + ", so it cannot be clipped, and" +
                  " this update is left out",
              LeftOut::Reason::kNotClipped);
  } else if (result.targets > 0) {
    leave_out("the loss or the gradients are not finite" + left_out, LeftOut::Reason::kNotFinite);
  } else {
    leave_out("no target in its rows counts" + left_out, LeftOut::Reason::kNoTarget);
  }
}

ValidationResult Training::validate(const std::function<bool()>& stop) {
  const TraceSpan span(TraceKind::kPhase, "validation");
  const c10::AutoGradMode no_grad(false);
  const int64_t step = std::max<int64_t>(0, steps_done_ - 1);  // rows are as long as those of the last step
  require_stage(step);
  const BatchShape& shape = share_->shape;
  const Stage& now = stages_[stage_];
  const int64_t batches = data_.has_validation() ? config_.validation.batches : 0, rows = batches * now.batch;
  at::Tensor host = host_memory({shape.planes(), shape.own_rows, shape.length()}, at::kLong, device_);
  double total = 0, weight = 0;
  ValidationResult result;
  for (size_t source = 0; source < data_.sources(); ++source) {
    double of_source = 0, weight_of_source = 0;
    const auto own_rows = [&](int64_t batch) {
      std::vector<DrawnRow> own;
      for (int64_t row = 0; row < shape.own_rows; ++row) {
        own.push_back(data_.held_out(source, step, batch * now.batch + shape.first_row + row, rows));
      }
      return own;
    };
    const bool any = data_.validation_rows(source, step) > 0;
    for (int64_t i = 0; any && i < batches; ++i) {
      const bool stop_now = stop(), ahead = config_.data.documents && i + 1 < batches;
      const OpLabel agreement{"agreeing on validation's attention", i + 1, "batch"};
      std::vector<DrawnRow> next;
      const Batch batch = read_for(agreement, [&] {
        if (ahead) next = own_rows(i + 1);
        return fill_batch(data_, shape, own_rows(i), host.data_ptr<int64_t>());
      });
      const std::string when = "validation, batch " + std::to_string(i + 1);
      const std::vector<PlannedCall> calls_now = calls(requests(batch.rows), {}, when);
      plan(calls_now, agreement);
      if (ahead) plan_ahead(requests(next));
      const at::Tensor on_device = share_->on_device(host);
      const Attend attends = attend(calls_now);
      model_state_.begin_forward();
      const at::Tensor local = loss(on_device, share_->tables(on_device), attends);
      const auto filled = [&](double value) { return at::full_like(local, value, at::kDouble); };
      at::Tensor sums = at::stack({local.to(at::kDouble), filled(stop_now ? 1 : 0), filled(batch.weight)});
      if (mesh_.world().size() > 1) mesh_.world().all_reduce(sums, ReduceOp::kSum, {"validation loss", i + 1, "batch"});
      sums = sums.to(at::kCPU);
      of_source += sums[0].item<double>();
      weight_of_source += sums[2].item<double>();
      result.stop = sums[1].item<double>() > 0;
      if (result.stop) return result;
    }
    // Up to here these are sums divided by the number of tokens of a step.
    of_source *= static_cast<double>(now.tokens());
    result.of_source.push_back(of_source / weight_of_source);
    total += of_source;
    weight += weight_of_source;
  }
  result.loss = total / weight;
  for (const std::string& named : config_.validation.tasks) {
    for (const std::string& task : tasks_of(named)) {
      result.tasks.push_back(answer(task, stop, result.stop));
      if (result.stop) return result;
    }
  }
  return result;
}

TrainingState Training::state() const {
  TrainingState state{.step = steps_done_, .extra = {}};
  state.extra["updates"] = std::to_string(optimizer_.updates());
  state.extra["seed"] = std::to_string(config_.run.seed);
  state.extra["data"] = data_.state(steps_done_, uses_);
  state.extra["tokens"] = std::to_string(tokens_);
  if (const std::string spikes = spikes_.text(); !spikes.empty()) state.extra["spikes"] = spikes;
  state.extra["token"] = data_.is_text() ? "byte" : "id";
  constexpr std::string_view kTable = "model.";
  for (const KeyText& text : flatten(config_)) {
    if (text.key.starts_with(kTable)) state.model[text.key.substr(kTable.size())] = text.value;
  }
  return state;
}

std::vector<TensorSlice> Training::slices(bool written) const {
  std::vector<TensorSlice> slices = model_state_.slices("", nullptr, written);
  for (const TensorSlice& slice : model_state_.slices("optimizer.exp_avg.", &optimizer_.exp_avg(), written)) {
    slices.push_back(slice);
  }
  for (const TensorSlice& slice : model_state_.slices("optimizer.exp_avg_sq.", &optimizer_.exp_avg_sq(), written)) {
    slices.push_back(slice);
  }
  return slices;
}

void Training::begin_with(const std::function<void(const std::vector<TensorSlice>& into)>& read) {
  read(model_state_.slices("", nullptr, /*written=*/false));
  model_state_.replaced();
}

void Training::restore(const TrainingState& state,
                       const std::function<void(const std::vector<TensorSlice>& into)>& read) {
  const auto number = [&](const char* key) -> int64_t {
    const auto found = state.extra.find(key);
    try {
      return found == state.extra.end() ? -1 : std::stoll(found->second);
    } catch (const std::exception&) {
      return -1;
    }
  };
  const int64_t count = number("updates"), tokens = number("tokens");
  if (count < 0 || count > state.step || state.step < 0) {
    throw Error(ErrorKind::kInput, "checkpoint", "the checkpoint does not say how many updates were made");
  }
  const auto spikes = state.extra.find("spikes");
  spikes_.restore(spikes == state.extra.end() ? "" : spikes->second);
  stop_reading();
  for (int64_t step = state.step; step < steps_done_; ++step) {
    const std::vector<SourceUse> given = data_.uses(step);
    for (size_t i = 0; i < uses_.size(); ++i) uses_[i].add(given[i], -1);
  }
  read(slices(/*written=*/false));
  model_state_.replaced();
  optimizer_.set_updates(count);
  steps_done_ = state.step;
  // Earlier versions had rows of one length and one batch per step, and did not write the number of tokens.
  tokens_ = tokens >= 0 ? tokens : steps_done_ * stages_[0].batch * stages_[0].context;
}

}  // namespace annulus
