// See trainer.h.
#include "runtime/training/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <vector>

#include "attention/kernels/choose_kernel.h"
#include "comm/agreement.h"
#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/logging/log_setup.h"
#include "common/terminal.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "common/trace/recorder.h"
#include "memory/device_memory.h"
#include "runtime/data/dataset.h"
#include "runtime/data/sample_prompt.h"
#include "runtime/huggingface/model_files.h"
#include "runtime/huggingface/model_import.h"
#include "runtime/model/model.h"
#include "runtime/run/checkpoint.h"
#include "runtime/run/metrics.h"
#include "runtime/run/run_folder.h"
#include "runtime/run/run_messages.h"
#include "runtime/training/device_peak.h"
#include "runtime/training/gpu_precision.h"
#include "runtime/training/mesh.h"
#include "runtime/training/run_memory.h"
#include "runtime/training/run_report.h"
#include "runtime/training/run_saves.h"
#include "runtime/training/state/learning_rate.h"
#include "runtime/training/state/sharding.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

// One run on one rank. Only rank 0 has an opened folder, metrics and progress.
class Run {
 public:
  Run(const Config& config, Communicator& world, const TrainOptions& options)
      : config_(config), world_(world), options_(options), first_(world.rank() == 0) {}

  int train();

 private:
  void load_data();
  void open_resumed();
  void in_turn(const std::function<void()>& pack);
  void read_checkpoint();
  void restore();
  void require_something_to_do();
  void refuse_another_model();
  void tell_changes();
  void require_equal_ranks();
  void write_config() { write_atomically(FileSystem::real(), folder_->config_path(), to_toml(config_)); }
  void open_folder();
  void announce();
  void warn_of_later_keys(const std::vector<Stage>& stages);
  FileSystem& files() const { return options_.files ? *options_.files : FileSystem::real(); }
  bool asked_to_stop() const { return options_.stop ? options_.stop() : interrupted(); }
  // Rank 0 says what all ranks know alike.
  void say(std::string_view text) { tell(progress_.get(), LogLevel::kInfo, text); }
  void warn(std::string_view text) { tell(progress_.get(), LogLevel::kWarn, text); }
  void suggest_uses();
  bool rewind(StepResult& spike);  // whether the run has returned to a checkpoint
  bool validate();                 // whether to stop
  bool take_steps(bool validates);
  void save(bool last);
  void saved(const SavedCheckpoint& saved);
  int finish(bool stopped);
  Words command(const Words& more) const;
  // Tells the caller on rank 0 how the run could be continued from this checkpoint.
  void tell_checkpoint(int64_t step, const std::string& folder) const {
    if (!options_.on_checkpoint) return;
    options_.on_checkpoint(step, folder, step >= config_.run.steps ? Words() : command({"--resume", path_}));
  }

  const Config& config_;
  Communicator& world_;
  const TrainOptions& options_;
  const bool first_;
  std::unique_ptr<Dataset> data_;
  std::optional<ModelImport> import_;  // only in a new run with model.from, until its folder is made
  std::unique_ptr<Training> training_;
  std::unique_ptr<RunFolder> folder_;
  std::string path_;  // of the run's folder, on every rank
  std::unique_ptr<CheckpointStore> store_;
  std::optional<TrainingState> resumed_;  // the checkpoint to resume from, until it is restored
  std::optional<Config> before_;          // on rank 0 of a resumed run: its old configuration, until it has saved
  std::unique_ptr<Progress> progress_;
  std::optional<RunReport> report_;
  std::optional<RunTrace> trace_;
  std::optional<int64_t> saved_step_;  // of the newest checkpoint that is on the disk
  std::string kept_;                   // its folder
  std::unique_ptr<RunSaves> saves_;    // ends before the store and the report that it uses
  Sharding sharding_;
  RunMemory memory_;
  RunStart start_;
  const ExpectProgress expected_;
  std::optional<LongPhase> starting_{std::in_place};  // until the first step is done
};

void Run::load_data() {
  in_turn([&] {
    data_ = std::make_unique<Dataset>(config_.data, config_.run.seed, config_.model.vocab, options_.resume.has_value());
  });
}

// Locks the folder before anything is read from it, because another process could write to it.
void Run::open_resumed() {
  path_ = from_first(world_, {"opening the run folder"}, [&] {
    const std::string which = options_.resume->empty() ? config_.run.name : *options_.resume;
    folder_ = std::make_unique<RunFolder>(RunFolder::open(find_run(config_.run.folder, which)));
    return folder_->path();
  });
  together(
      world_, {"comparing with the run's configuration"}, [&] { refuse_another_model(); }, /*only_first=*/true);
  store_ = std::make_unique<CheckpointStore>(path_, config_.checkpoint.keep, files());
}

// Runs before anything is made for training, because the checkpoint also says which rows come next.
void Run::read_checkpoint() {
  std::vector<std::string> skipped;
  resumed_ = store_->open_newest_valid(world_, &skipped);
  for (const std::string& reason : skipped) warn("skipped a checkpoint: " + reason);
  if (!resumed_) {
    throw Error(ErrorKind::kInput, "train",
                "there is no usable checkpoint in " + path_ + " to resume from" +
                    (skipped.empty() ? "" : " (" + std::to_string(skipped.size()) + " damaged)") +
                    ": start again without --resume");
  }
  in_turn([&] {
    for (const std::string& line : data_->resume(resumed_->extra["data"], resumed_->step)) say(line);
  });
}

// Rank 0 packs rows of token shards that have not been packed yet; then the others, if they share its disk, find them.
void Run::in_turn(const std::function<void()>& pack) {
  together(world_, {"packing the data"}, pack, /*only_first=*/true);
  together(world_, {"opening the data"}, [&] {
    if (!first_) pack();
  });
}

void Run::restore() {
  together(world_, {"loading the checkpoint"}, [&] {
    training_->restore(*resumed_, [&](const std::vector<TensorSlice>& into) { store_->read(*resumed_, into); });
    saved_step_ = resumed_->step;
    kept_ = resumed_->folder;
    if (!before_) return;
    const std::string rates =
        learning_rate_change(optimizer_settings(*before_), optimizer_settings(config_), resumed_->step);
    if (!rates.empty()) say(rates);
    const std::string was = resumed_->extra["instructions"], now = instructions(config_);
    if (options_.device.is_cpu() && !was.empty() && was != now) say(instructions_change(was, now));
  });
  resumed_.reset();
}

// Refuses to resume with a model that differs from the one that was trained, even if the weights have the same shapes.
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
                    ": its weights were trained with the old values. Use these, or begin a new run without --resume");
  }
}

// Tells the user what a resumed run does differently than before.
void Run::tell_changes() {
  if (!before_) return;
  for (const ChangedKey& key : changed_keys(*before_, config_)) {
    say("changed: " + key.key + " = " + key.is + " (it was " + key.was + ")");
    if (key.key == "model.pattern") {
      warn(
          "the weights were trained with the previous pattern: from here on a query sees other keys, and the loss may "
          "jump");
    }
  }
}

void Run::require_something_to_do() {
  if (training_->steps_done() >= config_.run.steps) {
    throw Error(ErrorKind::kUsage, "train",
                path_ + " has done " + with_commas(training_->steps_done(), "step") + " and run.steps is " +
                    with_commas(config_.run.steps) + ": nothing is left to do; to continue, add --set run.steps=" +
                    std::to_string(2 * training_->steps_done()));
  }
}

void Run::require_equal_ranks() {
  std::vector<Field> fields;
  for (const KeyText& text : flatten(config_)) fields.push_back({text.key, text.value});
  fields.push_back({"data", data_->fingerprint() + ", " + data_->text()});
  fields.push_back({"attention", training_->attention_text()});
  fields.push_back({"resumed step", std::to_string(training_->steps_done())});
  if (import_) fields.push_back({"model.from", import_->weights().fingerprint()});
  fields.push_back({"weights", training_->weights_digest()});
  require_agreement(world_, fields, {"agreeing on the run"});
}

void Run::open_folder() {
  if (path_.empty()) {
    path_ = from_first(world_, {"making the run folder"}, [&] {
      folder_ = std::make_unique<RunFolder>(RunFolder::create(config_.run.folder, config_.run.name));
      return folder_->path();
    });
    store_ = std::make_unique<CheckpointStore>(path_, config_.checkpoint.keep, files());
  }
  if (config_.run.log_bytes > 0) {
    open_log_file(path_ + "/logs/rank-" + std::to_string(world_.rank()) + ".log", config_.run.log_bytes);
  }
  trace_.emplace(options_.trace, path_, world_, training_->steps_done());
  std::unique_ptr<MetricsWriter> metrics;
  together(
      world_, {"opening the run's files"},
      [&] {
        store_->require_writable();
        copy_tokenizer(data_->tokenizer_folder(), tokenizer_folder(path_));
        if (import_) import_->keep_files(path_);
        // A resumed run keeps the configuration of its checkpoints until it has written a new one.
        if (!options_.resume) write_config();
        metrics = std::make_unique<MetricsWriter>(
            folder_->metrics_path(), options_.resume ? std::optional<int64_t>(training_->steps_done()) : std::nullopt);
        tell_checkpoint(saved_step_.value_or(0), kept_);
        if (options_.on_folder) options_.on_folder(path_);
      },
      /*only_first=*/true);
  report_.emplace(config_, start_, world_, *training_, std::move(metrics), progress_.get());
  saves_ = std::make_unique<RunSaves>(
      world_, *store_,
      RunSaves::Settings{.behind = config_.checkpoint.background && memory_.copies_fit,
                         .goes_on = config_.checkpoint.on_error == "continue",
                         .on_disk = [this](int64_t step, const std::string& at) { tell_checkpoint(step, at); },
                         .saved = [this](const SavedCheckpoint& is) { saved(is); },
                         .warn = [this](const std::string& text) { warn(text); }});
}

// Says what the run is and what it computes on, as far as that is known before it takes memory.
void Run::announce() {
  start_.device = options_.device;
  start_.device_text = options_.device_reason.empty() ? options_.device.str() : options_.device_reason;
  start_.resumed = options_.resume.has_value();
  say("device " + start_.device_text + "  ranks " + std::to_string(world_.size()) + " (" +
      axes_text(fit_axes(mesh_axes(config_), world_.size())) + ")" +
      (options_.placement.empty() ? "" : "  placement " + options_.placement) + "  model " +
      short_count(parameter_estimate(model_shape(config_))) + " parameters  " + rows_text(config_.data));
  for (const std::string& line : options_.ring) say(line);
  say("attention kernel " + start_.kernel);
  if (import_) say(import_->text());
  const std::string gpu = gpu_name(options_.device);
  const std::optional<double> peak = peak_flops(gpu, compute_dtype(config_), config_.tf32);
  if (peak) start_.peak_flops = *peak * world_.size();
  if (gpu.empty()) return;
  say(peak ? "MFU is relative to " + rounded(*peak / 1e12, 1) + " TFLOP/s a rank (" + gpu +
                 ", dense, from its data sheet)"
           : "no MFU: the peak of " + gpu + " in " + config_.model.dtype + " is not known");
}

void Run::warn_of_later_keys(const std::vector<Stage>& stages) {
  if (!first_ || !stages.back().layers.see_later()) return;
  warn(
      "model.pattern lets a query see later keys, so the loss does not show how well the model would generate text: "
      "that needs causal patterns");
}

// Returns from the step just made, a spike, to the newest checkpoint; from there on the rows of that step are left out.
// If there is no checkpoint, only the update is left out.
bool Run::rewind(StepResult& spike) {
  const LongPhase lasts;
  const int64_t step = training_->steps_done() - 1;
  saves_->finish();
  std::vector<std::string> skipped;
  std::optional<TrainingState> state;
  if (saved_step_) state = store_->open_newest_valid(world_, &skipped);
  for (const std::string& reason : skipped) warn("skipped a checkpoint: " + reason);
  if (!state) {
    spike.note += "; there is no checkpoint to return to, so this update is left out";
    return false;
  }
  together(world_, {"loading the checkpoint"}, [&] {
    training_->restore(*state, [&](const std::vector<TensorSlice>& into) { store_->read(*state, into); });
  });
  in_turn([&] { data_->leave_out(step); });
  saved_step_ = state->step;
  kept_ = state->folder;
  warn(spike.note + "; back to the checkpoint of step " + with_commas(state->step) + ", leaving out the " +
       counted(data_->rows(step), "row") + " of this step");
  report_->rewound(step + 1, spike);
  return true;
}

bool Run::validate() {
  const RunReport::Pause pause(*report_);
  const ValidationResult result = training_->validate([&] { return asked_to_stop(); });
  if (!result.stop) report_->validation(result);
  return result.stop;
}

void Run::save(bool last) {
  const LongPhase lasts;
  const int64_t step = training_->steps_done();
  if (saved_step_ == step) return saves_->finish();
  const RunReport::Pause pause(*report_);
  TrainingState state = training_->state();
  if (options_.device.is_cpu()) state.extra["instructions"] = instructions(config_);
  if (!memory_.attention.empty()) state.extra["attention"] = memory_.attention;
  const std::vector<TensorSlice> slices = training_->slices_to_write();
  last ? saves_->save_last(state, slices) : saves_->save(state, slices);
}

// Called on all ranks when a checkpoint is on the disk.
void Run::saved(const SavedCheckpoint& saved) {
  together(
      world_, {"writing the checkpoint", saved.step, "step"},
      [&] {
        if (before_) write_config();
        before_.reset();
        report_->checkpoint(saved);
      },
      /*only_first=*/true);
  saved_step_ = saved.step;
  kept_ = saved.folder;
  tell(progress_.get(), LogLevel::kDebug,
       "the checkpoint of step " + std::to_string(saved.step) + " is in " + kept_ + "; training stood still for " +
           rounded(saved.stopped, 3) + " s of " + rounded(saved.seconds, 3) + " s");
}

// Returns the command that was typed without its --resume, followed by `more`.
Words Run::command(const Words& more) const {
  Words words = options_.command.empty() ? Words{options_.program, "train", "CONFIG"}
                                         : without_option(options_.command, "--resume");
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// Says how to evaluate the run and sample from it. Without the table of its ids, `sample` cannot tell what they mean.
void Run::suggest_uses() {
  if (data_->has_validation())
    say("evaluate:    " + shell_quote({options_.program, "evaluate", path_, "--data", "held-out"}));
  const std::string table = tokenizer_folder(path_) + "/tokens.table";
  if (!data_->is_text() && !is_file(table)) return;
  const std::string prompt = data_->is_text() ? "def " : sample_prompt(*data_, training_->steps_done() - 1, table);
  if (!prompt.empty()) say("sample:      " + shell_quote({options_.program, "sample", path_, "--prompt", prompt}));
}

int Run::finish(bool stopped) {
  if (!first_) return stopped ? interrupt_exit_code() : 0;
  progress_->finish();
  const std::string time = format_duration(report_->seconds());
  if (stopped) {
    say("stopped after step " + with_commas(training_->steps_done()) + " of " + with_commas(config_.run.steps) +
        "; checkpoint written (" + time + ")");
    say("continue:    " + shell_quote(command({"--resume", path_})));
    return interrupt_exit_code();
  }
  const std::optional<double> loss = report_->validation_loss();
  const auto shown = [&] {
    return data_->is_text() ? rounded(bits_per_byte(*loss), 2) + " bits per byte" : "loss " + rounded(*loss, 3);
  };
  say("done: " + with_commas(config_.run.steps, "step") + " in " + time + (loss ? ", validation " + shown() : "") +
      ", in " + path_);
  suggest_uses();
  Words onward = without_option(command({"--resume", path_}), "--set", "run.steps=");
  onward.insert(onward.end(), {"--set", "run.steps=" + std::to_string(2 * config_.run.steps)});
  say("train on:    " + shell_quote(onward));
  return 0;
}

int Run::train() {
  if (first_) {
    std::ostream& out = options_.out != nullptr ? *options_.out : std::cout;
    // mpirun gives its first rank a terminal whatever its own output is; `launch` sets ANNULUS_PROGRESS instead.
    const bool terminal = options_.out == nullptr && world_.size() == 1 && takes_escapes(STDOUT_FILENO);
    progress_ = std::make_unique<Progress>(progress_mode(std::getenv("ANNULUS_PROGRESS"), terminal), out);
  }
  world_.set_timeout(Seconds(config_.timeout));
  bound_memory(config_.memory);
  std::vector<Stage> stages = options_.stages ? *options_.stages : check_training(config_, world_.size());
  if (config_.optimizer.shard_within == "host") {
    const std::string what =
        "number of ranks on a host, which must be the same everywhere (start as many on each "
        "host, or set optimizer.shard_within = \"world\"),";
    require_agreement(world_, {{what, std::to_string(options_.ranks_here)}}, {"sharing the state within hosts"});
  }
  sharding_ = make_sharding(config_, world_.size(), options_.ranks_here);
  if (!sharding_.groups.empty()) sharding_.groups = world_.hosts().groups().sizes();  // hosts may differ
  // The choice of a kernel depends on these settings.
  if (options_.device.is_cuda()) set_gpu_precision({.tf32 = config_.tf32, .deterministic = config_.deterministic});
  together(world_, {"choosing the attention kernel"}, [&, &m = config_.model] {
    start_.kernel = choose_kernel(parse_kernel(config_.attention.kernel, "attention.kernel"), options_.device.type(),
                                  compute_dtype(config_), m.head_dim(), m.dropout > 0, m.softcap > 0)
                        .reason;
  });
  try {
    load_data();
  } catch (const Error&) {
    if (!asked_to_stop()) throw;
    say("stopped before the first step; no partly packed data is left");
    return interrupt_exit_code();
  }
  if (options_.resume) open_resumed();
  if (!options_.resume && !config_.model.from.empty()) {
    together(world_, {"opening the model"},
             [&] { import_.emplace(config_.model, data_->is_text(), data_->tokenizer()); });
  }
  take_data(stages, data_->weighs_targets(), data_->has_trees());
  announce();
  warn_of_later_keys(stages);
  tell_changes();
  const RunDevice on{options_.device, options_.ranks_here, options_.available};
  if (options_.resume) require_least_memory(config_, sharding_, world_, on), read_checkpoint();
  memory_ = require_memory_for(config_, stages, sharding_, world_, on, resumed_ ? resumed_->extra["attention"] : "",
                               [&](std::string_view line) { say(line); });
  start_.memory = memory_.plan.kinds();
  training_ = std::make_unique<Training>(config_, std::move(stages), world_, *data_, options_.device, sharding_);
  if (options_.resume) restore();
  if (import_) {
    together(world_, {"reading the model"}, [&] {
      training_->begin_with([&](const std::vector<TensorSlice>& into) { import_->weights().read(into); });
    });
  }
  for (const std::string& warning : data_->warnings()) warn(warning);
  require_equal_ranks();
  require_something_to_do();  // all ranks have compared the resumed step, so all raise or none
  open_folder();
  import_.reset();
  const std::string resumed = options_.resume ? "  resumed after step " + with_commas(training_->steps_done()) : "";
  say("data " + data_->text() + "  run folder " + path_ + resumed);
  const bool validates = config_.validation.every > 0 && (data_->has_validation() || !config_.validation.tasks.empty());
  bool stop = false;
  try {
    stop = take_steps(validates);
  } catch (const Error& error) {
    // All ranks raise alike that updates were left out too often, so they can still wait for the checkpoint under way.
    if (error.kind() == ErrorKind::kUsage) saves_->finish();
    throw;
  }
  return finish(stop && training_->steps_done() < config_.run.steps);
}

// Trains until the last step, or until a rank is asked to stop, and saves. Returns whether one was.
bool Run::take_steps(bool validates) {
  bool stop = false, due = false;  // due: a checkpoint is to be written after the next applied update
  while (!stop && training_->steps_done() < config_.run.steps) {
    for (const std::string& line : trace_->before_step(training_->steps_done())) say(line);
    StepResult result = training_->step(asked_to_stop(), report_->carry());
    starting_.reset();
    stop = result.stop;
    if (result.spike && config_.optimizer.spike_action == "rewind" && rewind(result)) {
      due = false;
      continue;
    }
    const int64_t step = training_->steps_done();
    const bool last = step == config_.run.steps;
    const bool validated = !stop && validates && (last || step % config_.validation.every == 0);
    if (validated) stop = validate();
    if (!result.note.empty()) warn(result.note);
    report_->step(result, validated);
    if (first_ && options_.on_step) options_.on_step(step);
    due = due || (config_.checkpoint.every > 0 && step % config_.checkpoint.every == 0);
    if (last) training_->require_updates();
    if (!stop && !last && saves_->under_way()) {
      const RunReport::Pause pause(*report_);
      saves_->advance();
    }
    // A checkpoint waits for a step whose update was applied, unless no other step follows.
    if (!stop && !last && !(due && result.applied)) continue;
    save(stop || last);
    due = false;
  }
  for (const std::string& line : trace_->finish(training_->steps_done())) say(line);
  return stop;
}

}  // namespace

int run_training(const Config& config, Communicator& world, const TrainOptions& options) {
  const TraceThread thread(world.in_job(world.rank()), kMainThread);
  return Run(config, world, options).train();
}

}  // namespace annulus
