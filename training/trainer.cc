// See trainer.h.
#include "training/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "attention/plan/plan.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "data/text_source.h"
#include "device/device_peak.h"
#include "device/numerics.h"
#include "memory/available.h"
#include "memory/caches.h"
#include "memory/device_memory.h"
#include "model/model.h"
#include "training/checkpoint.h"
#include "training/memory_plan.h"
#include "training/mesh.h"
#include "training/metrics.h"
#include "training/optimizer.h"
#include "training/run_folder.h"
#include "training/training.h"

namespace annulus {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string rounded(double value, int digits) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return text.data();
}

// 1267008 -> "1.27M"
std::string short_count(double value) {
  if (value >= 1e12) return rounded(value / 1e12, 2) + "T";
  if (value >= 1e9) return rounded(value / 1e9, 2) + "B";
  if (value >= 1e6) return rounded(value / 1e6, 2) + "M";
  if (value >= 1e3) return rounded(value / 1e3, 1) + "k";
  return rounded(value, 0);
}

using Words = std::vector<std::string>;

// Leaves out OPTION where its value begins with `value`, be they one word, OPTION=VALUE, or two; with an empty `value`
// also OPTION alone. A word that begins with "-" is the next option.
Words without_option(const Words& command, const std::string& option, const std::string& value = "") {
  Words kept;
  for (auto word = command.begin(); word != command.end(); ++word) {
    if (word->starts_with(option + "=" + value)) continue;
    if (*word == option) {
      const auto next = word + 1;
      if (next != command.end() && !next->starts_with("-") && next->starts_with(value)) {
        ++word;
        continue;
      }
      if (value.empty()) continue;
    }
    kept.push_back(*word);
  }
  return kept;
}

// Of this process so far.
MetricsWriter::Table used_caches() {
  MetricsWriter::Table table;
  for (const CacheReport& cache : cache_reports()) {
    const CacheStats& s = cache.stats;
    if (s.hits + s.misses == 0) continue;
    table.push_back({cache.name,
                     {{"bytes", s.bytes},
                      {"entries", s.entries},
                      {"hits", s.hits},
                      {"misses", s.misses},
                      {"evictions", s.evictions},
                      {"too_large", s.too_large}}});
  }
  return table;
}

// One run on one rank. Rank 0 alone has an opened folder, metrics and progress.
class Run {
 public:
  Run(const Config& config, Communicator& world, const TrainOptions& options)
      : config_(config), world_(world), options_(options), first_(world.rank() == 0) {}

  int train();

 private:
  void load_text();
  void open_resumed();
  void load_checkpoint();
  void require_something_to_do();
  void refuse_another_model();
  void tell_changes();
  double waited() const;
  // Model FLOPs utilization at this speed; empty where the devices' peak is not known.
  std::optional<double> utilization(double tokens_per_second) const;
  // Puts the interval's beginning forward by what has passed since `before`: it is no part of the steps.
  struct Clock {
    double time, waited, planned;
  };
  Clock clock() const { return {now(), waited(), plan_stats().seconds_on_path}; }
  void leave_out_since(const Clock& before);
  void require_equal_ranks();
  void write_config() { write_atomically(FileSystem::real(), folder_->config_path(), to_toml(config_)); }
  void open_folder();
  void announce();
  std::optional<AvailableMemory> available() const;
  void require_memory_for(const LayerRequests& layers);
  bool asked_to_stop() const { return options_.stop ? options_.stop() : interrupted(); }
  void say(std::string_view text) {
    if (progress_) progress_->message(text);
  }
  void report(const StepResult& result, bool validated);
  bool validate();  // true: stop
  void save();
  int finish(bool stopped);
  Words command(const Words& more) const;

  const Config& config_;
  Communicator& world_;
  const TrainOptions& options_;
  const bool first_;
  std::unique_ptr<TextSource> text_;
  std::unique_ptr<Training> training_;
  std::unique_ptr<RunFolder> folder_;
  std::string kernel_;  // which one attention is computed with, and why
  std::string path_;    // of the run's folder, on every rank
  std::unique_ptr<CheckpointStore> store_;
  std::optional<Config> before_;  // on rank 0, of a run that is resumed, until its own first checkpoint
  std::unique_ptr<MetricsWriter> metrics_;
  std::unique_ptr<Progress> progress_;
  std::optional<double> validation_;   // bits per byte, of the last validation
  std::optional<int64_t> saved_step_;  // of the newest checkpoint
  double begin_ = 0;                   // of the first step
  int64_t begin_step_ = 0;
  Clock interval_ = {};  // at the last metrics line, put forward by validations and checkpoints since
  int64_t interval_steps_ = 0;
  double tokens_per_second_ = 0;
  MemoryPlan memory_;
  std::optional<double> peak_flops_;  // of all ranks' devices together
  double flops_per_token_ = 0;
};

void Run::load_text() {
  together(world_, {"reading the text", 0},
           [&] { text_ = std::make_unique<TextSource>(config_.data, config_.run.seed); });
}

// Takes the folder before anything is read from it: its owner could write meanwhile.
void Run::open_resumed() {
  path_ = from_first(world_, {"opening the run folder", 0}, [&] {
    const std::string which = options_.resume->empty() ? config_.run.name : *options_.resume;
    folder_ = std::make_unique<RunFolder>(RunFolder::open(find_run(config_.run.folder, which)));
    return folder_->path();
  });
  together(
      world_, {"comparing with the run's configuration", 0}, [&] { refuse_another_model(); }, /*only_first=*/true);
  store_ = std::make_unique<CheckpointStore>(path_, config_.checkpoint.keep);
}

void Run::load_checkpoint() {
  together(world_, {"loading the checkpoint", 0}, [&] {
    std::vector<std::string> skipped;
    const std::optional<TrainingState> state = store_->load_newest_valid(&skipped);
    for (const std::string& reason : skipped) say("passed over a checkpoint: " + reason);
    if (!state) {
      throw Error(ErrorKind::kInput, "train",
                  "there is no whole checkpoint in " + path_ + " to resume from" +
                      (skipped.empty() ? "" : " (" + std::to_string(skipped.size()) + " damaged)") +
                      ": start anew without --resume");
    }
    training_->restore(*state);
    saved_step_ = state->step;
    const auto text = state->extra.find("text");
    if (text != state->extra.end() && text->second != text_->fingerprint()) {
      say("the text is not the one this run was begun with: the loss may jump");
    }
    if (!before_) return;
    const std::string rates =
        learning_rate_change(optimizer_settings(*before_), optimizer_settings(config_), state->step);
    if (!rates.empty()) say(rates);
  });
}

// Other than the one that was trained, though its weights may have the same shapes.
void Run::refuse_another_model() {
  before_ = load_config(folder_->config_path());
  std::string refused;
  for (const ChangedKey& key : changed_keys(*before_, config_)) {
    if (!key.of_model) continue;
    refused += (refused.empty() ? "" : ", ") + key.key + " = " + key.was + ", now it is " + key.is;
  }
  if (!refused.empty()) {
    throw Error(ErrorKind::kUsage, "train",
                path_ + " was trained with " + refused +
                    ": its weights mean nothing so. Leave that as it was, or begin a new run without --resume");
  }
}

// What a resumed run does otherwise than before.
void Run::tell_changes() {
  if (!before_) return;
  for (const ChangedKey& key : changed_keys(*before_, config_)) {
    say("changed: " + key.key + " = " + key.is + " (it was " + key.was + ")");
    if (key.key == "model.pattern") {
      say("the weights were trained with the pattern before: from here on a query sees other keys, and the loss may "
          "jump");
    }
  }
}

void Run::require_something_to_do() {
  if (training_->steps_done() >= config_.run.steps) {
    throw Error(ErrorKind::kUsage, "train",
                path_ + " has done " + counted(training_->steps_done(), "step") + " and run.steps is " +
                    std::to_string(config_.run.steps) + ": nothing is left to do; to train on, add --set run.steps=" +
                    std::to_string(2 * training_->steps_done()));
  }
}

void Run::require_equal_ranks() {
  std::vector<Field> fields;
  for (const std::string& line : flatten(config_)) {
    const size_t equals = line.find(" = ");
    fields.push_back({line.substr(0, equals), equals == std::string::npos ? "" : line.substr(equals + 3)});
  }
  fields.push_back({"text", text_->fingerprint() + ", " + text_->text()});
  fields.push_back({"attention", training_->attention_text()});
  fields.push_back({"resumed step", std::to_string(training_->steps_done())});
  fields.push_back({"weights", training_->weights_digest()});
  require_agreement(world_, fields, {"agreeing on the run", 0});
}

void Run::open_folder() {
  if (path_.empty()) {
    path_ = from_first(world_, {"making the run folder", 0}, [&] {
      folder_ = std::make_unique<RunFolder>(RunFolder::create(config_.run.folder, config_.run.name));
      return folder_->path();
    });
    store_ = std::make_unique<CheckpointStore>(path_, config_.checkpoint.keep);
  }
  together(
      world_, {"opening the run's files", 0},
      [&] {
        // That of a resumed run stays what its checkpoints were made with until there is a new one.
        if (!options_.resume) write_config();
        metrics_ = std::make_unique<MetricsWriter>(
            folder_->metrics_path(), options_.resume ? std::optional<int64_t>(training_->steps_done()) : std::nullopt);
      },
      /*only_first=*/true);
}

// What the run is and what it computes on, as far as that is known before any of its memory is taken.
void Run::announce() {
  const std::string device = options_.device_reason.empty() ? options_.device.str() : options_.device_reason;
  say("device " + device + "  ranks " + std::to_string(world_.size()) + " (" +
      axes_text(fit_axes(mesh_axes(config_), world_.size())) + ")" +
      (options_.placement.empty() ? "" : "  placement " + options_.placement) + "  model " +
      short_count(parameter_estimate(model_shape(config_))) + " parameters  " +
      with_commas(config_.data.batch * config_.data.context) + " tokens a step");
  for (const std::string& line : options_.ring) say(line);
  say("attention kernel " + kernel_);
  const std::string gpu = gpu_name(options_.device);
  const std::optional<double> peak = peak_flops(gpu, compute_dtype(config_), config_.tf32);
  if (peak) peak_flops_ = *peak * world_.size();
  if (gpu.empty()) return;
  say(peak ? "MFU is of " + rounded(*peak / 1e12, 1) + " TFLOP/s a rank (" + gpu + ", dense, by its data sheet)"
           : "no MFU: the peak of " + gpu + " in " + config_.model.dtype + " is not known");
}

std::optional<AvailableMemory> Run::available() const {
  if (options_.available) return options_.available();
  if (!options_.device.is_cuda()) return available_memory();
  const DeviceMemory memory = device_memory(options_.device);
  return AvailableMemory{memory.total - memory.outside - memory.allocated, "the GPU's memory"};
}

// What the run will take is worked out, said and held against what is free before any of it is taken. Every rank does:
// the kernel ends whom it likes where a host has too little, and without a word.
void Run::require_memory_for(const LayerRequests& layers) {
  const bool gpu = options_.device.is_cuda();
  const int context = world_.size() / static_cast<int>(config_.mesh.data), ranks = gpu ? 1 : options_.ranks_here;
  std::optional<AvailableMemory> free;
  together(world_, {"planning the memory", 0}, [&] {
    free = available();
    require_memory("at least ", least_memory(config_, context), ranks, free);
    memory_ = plan_memory(config_, layers, context, world_.rank() % context, gpu);
  });
  say("memory: " + memory_.text());
  // A checkpoint is read while there are no activations yet: weights and moments once more, on the host.
  const int64_t read = options_.resume && !gpu ? 3 * sizeof(float) * parameter_count(model_shape(config_)) : 0;
  const int64_t most = std::max(memory_.total(), memory_.step.lasting() + read);
  together(world_, {"planning the memory", 1}, [&] { require_memory("", static_cast<double>(most), ranks, free); });
}

void Run::report(const StepResult& result, bool validated) {
  ++interval_steps_;
  const int64_t step = training_->steps_done();
  if (!result.applied) {
    say("step " + std::to_string(step) + ": the loss or the gradients are not finite, this update is left out");
  }
  if (!result.note.empty()) say(result.note);
  if (!first_) return;
  const bool log = step % std::max<int64_t>(1, config_.run.log_every) == 0 || step == config_.run.steps || result.stop;
  const Clock here = clock();
  const double time = here.time;
  const double tokens = static_cast<double>(training_->tokens_per_step()) * static_cast<double>(interval_steps_);
  const double elapsed = time - interval_.time;
  const double speed = elapsed > 0 ? tokens / elapsed : 0;
  if (log) {
    tokens_per_second_ = speed;
    // Hosts do not wait for transfers between GPUs, and nothing measures the devices' waits.
    const double exposed =
        options_.device.is_cuda() ? std::numeric_limits<double>::quiet_NaN() : here.waited - interval_.waited;
    MetricsWriter::Fields fields = {{"loss", result.loss},
                                    {"bits_per_byte", bits_per_byte(result.loss)},
                                    {"gradient_norm", result.gradient_norm},
                                    {"learning_rate", result.lr},
                                    {"tokens", step * training_->tokens_per_step()},
                                    {"tokens_per_second", speed},
                                    {"exposed_communication_seconds", exposed},
                                    {"exposed_planning_seconds", here.planned - interval_.planned},
                                    {"plans_made", plan_stats().programs_made},
                                    {"plan_cache_hits", plan_stats().programs.hits},
                                    {"caches", used_caches()},
                                    {"seconds", time - begin_}};
    if (const auto share = utilization(speed)) fields.emplace_back("model_flops_utilization", *share);
    metrics_->write(step, fields);
    interval_ = here;
    interval_steps_ = 0;
  }
  const int64_t done = step - begin_step_;
  progress_->report(
      {.step = step,
       .steps = config_.run.steps,
       .loss = result.loss,
       .validation_bits_per_byte = validation_,
       .tokens_per_second = tokens_per_second_ > 0 ? tokens_per_second_ : speed,
       .utilization = utilization(tokens_per_second_ > 0 ? tokens_per_second_ : speed),
       .seconds_left = (time - begin_) / static_cast<double>(done) * static_cast<double>(config_.run.steps - step)},
      /*important=*/validated || step == config_.run.steps);
}

// Seconds that this rank has waited for others so far.
double Run::waited() const {
  return world_.stats().wait_seconds + training_->mesh().axis("context").stats().wait_seconds;
}

std::optional<double> Run::utilization(double tokens_per_second) const {
  if (!peak_flops_) return std::nullopt;
  return tokens_per_second * flops_per_token_ / *peak_flops_;
}

void Run::leave_out_since(const Clock& before) {
  const Clock after = clock();
  interval_.time += after.time - before.time;
  interval_.waited += after.waited - before.waited;
  interval_.planned += after.planned - before.planned;
}

bool Run::validate() {
  const Clock before = clock();
  const ValidationResult result = training_->validate([&] { return asked_to_stop(); });
  leave_out_since(before);
  if (result.stop) return true;
  validation_ = bits_per_byte(result.loss);
  if (first_) {
    metrics_->write(training_->steps_done(),
                    {{"validation_loss", result.loss}, {"validation_bits_per_byte", *validation_}});
  }
  return false;
}

void Run::save() {
  const int64_t step = training_->steps_done();
  if (saved_step_ == step) return;
  const Clock before = clock();
  together(
      world_, {"writing the checkpoint", step},
      [&] {
        try {
          store_->save(training_->state());
          if (before_) write_config();
          before_.reset();
        } catch (const Error& e) {
          const std::string kept = saved_step_
                                       ? "; the checkpoint of step " + std::to_string(*saved_step_) +
                                             " is intact: continue with  " + shell_quote(command({"--resume", path_}))
                                       : "; there is no earlier checkpoint of this run";
          throw Error(e.kind(), e.room(), std::string(e.message()) + kept);
        }
      },
      /*only_first=*/true);
  saved_step_ = step;
  leave_out_since(before);
}

// The command that was typed, without its --resume, and `more`.
Words Run::command(const Words& more) const {
  Words words = options_.command.empty() ? Words{options_.program, "train", "CONFIG"}
                                         : without_option(options_.command, "--resume");
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

int Run::finish(bool stopped) {
  if (!first_) return stopped ? interrupt_exit_code() : 0;
  progress_->finish();
  const std::string step = std::to_string(training_->steps_done());
  const std::string steps = std::to_string(config_.run.steps);
  const std::string time = format_duration(now() - begin_);
  if (stopped) {
    say("stopped on request after step " + step + " of " + steps + ", with a checkpoint, after " + time);
    say("continue:    " + shell_quote(command({"--resume", path_})));
    return interrupt_exit_code();
  }
  say("done: " + counted(config_.run.steps, "step") + " in " + time +
      (validation_ ? ", validation " + rounded(*validation_, 2) + " bits per byte" : "") + ", in " + path_);
  say("sample:      " + shell_quote({options_.program, "sample", path_, "--prompt", "def "}));
  Words onward = without_option(command({"--resume", path_}), "--set", "run.steps=");
  onward.insert(onward.end(), {"--set", "run.steps=" + std::to_string(2 * config_.run.steps)});
  say("train on:    " + shell_quote(onward));
  return 0;
}

int Run::train() {
  if (first_) {
    std::ostream& out = options_.out != nullptr ? *options_.out : std::cout;
    // mpirun gives its first rank a terminal whatever its own output is; `launch` says what it has.
    const bool terminal = options_.out == nullptr && world_.size() == 1 && isatty(STDOUT_FILENO) == 1;
    progress_ = std::make_unique<Progress>(progress_mode(std::getenv("ANNULUS_PROGRESS"), terminal), out);
  }
  world_.set_timeout(Seconds(config_.timeout));
  set_cache_total(config_.memory.caches << 20);
  LayerRequests layers = options_.layers ? *options_.layers : check_training(config_, world_.size());
  // The choice of a kernel depends on it.
  if (options_.device.is_cuda()) set_gpu_numerics({.tf32 = config_.tf32, .deterministic = config_.deterministic});
  together(world_, {"choosing the attention kernel", 0}, [&] {
    kernel_ = choose_kernel(parse_kernel(config_.attention.kernel, "attention.kernel"), options_.device.type(),
                            compute_dtype(config_), config_.model.dim / config_.model.heads, config_.model.dropout > 0)
                  .reason;
  });
  load_text();
  if (options_.resume) open_resumed();
  announce();
  tell_changes();
  require_memory_for(layers);
  training_ = std::make_unique<Training>(config_, std::move(layers), world_, *text_, options_.device);
  if (options_.resume) load_checkpoint();
  require_equal_ranks();
  require_something_to_do();  // alike on all ranks by now
  open_folder();
  if (peak_flops_) flops_per_token_ = training_->flops_per_token();
  say("text " + text_->text() + "  run folder " + path_ +
      (options_.resume ? "  resumed after step " + std::to_string(training_->steps_done()) : ""));

  const bool validates = config_.validation.every > 0 && config_.validation.batches > 0 && text_->has_validation();
  interval_ = clock();
  begin_ = interval_.time;
  begin_step_ = training_->steps_done();
  bool stop = false, due = false;  // due: a checkpoint
  while (!stop && training_->steps_done() < config_.run.steps) {
    const StepResult result = training_->step(asked_to_stop());
    const int64_t step = training_->steps_done();
    const bool last = step == config_.run.steps;
    stop = result.stop;
    const bool validated = !stop && validates && (last || step % config_.validation.every == 0);
    if (validated) stop = validate();
    report(result, validated);
    due = due || (config_.checkpoint.every > 0 && step % config_.checkpoint.every == 0);
    if (last) training_->require_updates();
    // Weights that gave no finite loss are kept only where there is no other step to wait for.
    if (stop || last || (due && result.applied)) {
      save();
      due = false;
    }
  }
  return finish(stop && training_->steps_done() < config_.run.steps);
}

}  // namespace

int run_training(const Config& config, Communicator& world, const TrainOptions& options) {
  return Run(config, world, options).train();
}

}  // namespace annulus
