// annulus train: one rank of a training job. This file has the options and starts the rank; runtime/training/trainer.h
// does the work.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/text.h"
#include "common/trace/last_operations.h"
#include "common/trace/recorder.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/launch/exit_report.h"
#include "launcher/launch/rank.h"
#include "launcher/launch/rank_place.h"
#include "launcher/python_programs/follower.h"
#include "launcher/rank_locations.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/start_job.h"
#include "runtime/config/config.h"
#include "runtime/huggingface/model_config.h"
#include "runtime/report/live_report.h"
#include "runtime/run/run_folder.h"
#include "runtime/training/trainer.h"
#include "runtime/training/training.h"

namespace annulus {
namespace {

class TrainSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("CONFIG", config_path_,
                   "TOML file, such as configs/quickstart.toml (default with --resume: the run's own)");
    add_repeated(app, "--set", sets_, "override one key of the configuration: --set run.steps=100", "KEY=VALUE");
    resume_ = app.add_option("--resume", resume_run_,
                             "continue a run, given by its folder or name, from its newest checkpoint (default: the "
                             "newest run with a checkpoint that has the configuration's name, if CONFIG is given)")
                  ->expected(0, 1)
                  ->type_name("[RUN]");
    app.add_option("--init", init_,
                   "begin with the model in a folder in Hugging Face's layout; short for --set model.from=FOLDER (a "
                   "resumed run keeps its own model)")
        ->type_name("FOLDER");
    app.add_flag("--report", report_,
                 "write report.html into the run's folder, and again every 10 s or so: a page for a browser that shows "
                 "how the run goes (annulus report)");
    app.add_option("--trace", trace_,
                   "trace these steps, such as 100-104: what every rank computes, sends, waits for and reads, to "
                   "RUN/traces in Chrome's format, which ui.perfetto.dev shows (docs/how-to/monitoring.md)")
        ->type_name("FIRST-LAST");
    app.add_flag("--help-config", help_config_,
                 "print a configuration to begin with: every key, its default and what it is for");
    app.callback([this] { resuming_ = resume_->count() > 0; });
    app.footer(
        "Examples:\n"
        "  ./annulus launch -n 2 train configs/quickstart.toml\n"
        "  ./annulus launch -n 2 train configs/quickstart.toml --set run.steps=50 --set run.name=short\n"
        "  ./annulus launch -n 2 train configs/quickstart.toml --report\n"
        "  ./annulus launch -n 2 train configs/quickstart.toml --resume\n"
        "  ./annulus launch -n 2 train --resume quickstart-001\n"
        "  ./annulus train --help-config > my.toml");
  }

  void check() override {
    if (help_config_) return;
    if (config_path_.empty()) take_configuration_of_run();
    std::error_code error;
    if (std::filesystem::is_regular_file(config_path_ + "/config.toml", error)) {
      throw Error(ErrorKind::kInput, "launcher",
                  config_path_ + " is a run folder: continue it with --resume " + config_path_ +
                      ", or name a TOML file to begin another run");
    }
    if (!init_.empty()) sets_.push_back("model.from=" + toml_string(init_));
    config_ = load_config(config_path_, sets_, [&](const Config& given) { return read_model(given); });
    network();  // throws if a name is malformed
    if (!trace_.empty()) steps_ = parse_trace_steps(trace_, config_.run.steps);
  }

  Network network() const override {
    const NetworkSection& n = config_.network;
    return parse_network(n.interfaces, n.hcas, n.rank_hca, config_path_ + ": [network]");
  }

  std::string device() const override { return config_.device; }
  std::vector<std::string> files() const override { return {config_path_}; }
  int64_t keep_logs() const override { return config_.run.keep_logs; }

  int context(int ranks) const override {
    const int64_t context = config_.mesh.context > 0 ? config_.mesh.context : ranks / config_.mesh.data;
    // fit_axes throws later, with a complete message, if the mesh does not fit the ranks.
    return context > 0 && ranks % context == 0 ? static_cast<int>(context) : ranks;
  }

  void require_fit(int ranks) const override { check_training(config_, ranks); }
  bool resumes() const override { return true; }

  int run() override {
    if (help_config_) {
      std::fputs(config_template().c_str(), stdout);
      return 0;
    }
    // mpirun ends the other ranks of a job in which one has failed by SIGTERM, and soon after by SIGKILL.
    install_interrupt_handlers([](int signal) {
      if (signal == SIGTERM) save_last_operations(trace_rank(), "the rank was asked to end by SIGTERM");
    });
    std::string text;
    for (const KeyText& text_of : flatten(config_)) text += text_of.key + " = " + text_of.value + "\n";
    Job job =
        start_job({{"configuration", text}, {"resume", resuming_ ? "yes " + resume_run_ : "no"}, {"trace", trace_}});
    TrainOptions options;
    job.run_together({"checking the configuration", 0}, [&] { options.stages = check_training(config_, job.size); });
    const DeviceChoice choice = choose_devices(job, config_.device);
    const std::shared_ptr<Communicator> gpus = connect_devices(job, choice);

    if (resuming_) options.resume = resume_run_;
    options.device = choice.device;
    options.device_reason = choice.reason;
    options.placement = rank_place().text();
    options.ring = ring_lines(gather_rank_locations(job, choice.device.is_cuda()), context(job.size));
    options.ring.insert(options.ring.end(), network_lines().begin(), network_lines().end());
    options.command = typed_words(job.size);
    options.program = typed_program();
    options.ranks_here = job.local_size;
    options.trace = steps_;
    std::optional<ResumePoint> last;  // without a launcher, rank 0 itself prints how to continue the run
    options.on_checkpoint = [&last](int64_t step, const std::string& folder, const std::vector<std::string>& command) {
      if (attached_to_launcher()) {
        report_checkpoint(step, folder, command);
      } else {
        last = {.step = step, .folder = folder, .command = command};
      }
    };
    options.on_step = report_step;
    std::unique_ptr<LiveReport> page;  // on rank 0
    options.on_folder = [&](const std::string& folder) {
      if (report_) page = std::make_unique<LiveReport>(folder);
      if (!config_.run.tensorboard) return;
      const std::string wrong = start_follower(folder);
      if (wrong.empty()) return;
      log_warn("train", "no event files for TensorBoard are written (" + wrong + "); `annulus report --tensorboard " +
                            shell_quote({folder}) + "` writes them at any time");
    };
    const auto say_how_to_go_on = [&last] {
      if (!last || last->command.empty()) return;
      const std::string text = resume_text(resume_point(last->step, last->folder, last->command));
      log_warn("train", text);
    };
    try {
      const int code = run_training(config_, gpus ? *gpus : *job.world, options);
      if (code != 0 && !std::cout) say_how_to_go_on();  // the trainer's own message was lost with standard output
      return code;
    } catch (const std::exception& error) {
      if (page) page->failed(error.what());
      say_how_to_go_on();
      throw;
    }
  }

 private:
  void take_configuration_of_run() {
    const std::string needs = "train needs a configuration: a TOML file, such as configs/quickstart.toml";
    if (!resuming_) refuse_usage(needs + ", or a run to --resume");
    std::error_code error;
    if (std::filesystem::is_regular_file(resume_run_, error)) {
      refuse_usage(needs + " (\"" + resume_run_ + "\" was read as the run to resume: name CONFIG first)");
    }
    const auto moves = [](const std::string& set) { return set.starts_with("run.folder"); };
    if (resume_run_.find('/') == std::string::npos && std::any_of(sets_.begin(), sets_.end(), moves)) {
      refuse_usage("without CONFIG a run is looked up in " + RunConfig{}.folder +
                   ", whatever --set run.folder says: name its path, --resume FOLDER/NAME");
    }
    resume_run_ = find_run(RunConfig{}.folder, resume_run_);
    config_path_ = resume_run_ + "/config.toml";
  }

  // A resumed run keeps the model that it began with, even if the folder of model.from has changed.
  ModelSection read_model(const Config& given) const {
    if (resuming_) {
      const std::string run = find_run(given.run.folder, resume_run_.empty() ? given.run.name : resume_run_);
      const std::string kept = huggingface_folder(run);
      std::error_code error;
      if (std::filesystem::is_regular_file(kept + "/config.json", error)) return read_model_config(kept);
    }
    return read_model_from(given);
  }

  std::string config_path_, init_;
  std::vector<std::string> sets_;
  std::string trace_;
  std::optional<TraceSteps> steps_;
  CLI::Option* resume_ = nullptr;
  std::string resume_run_;
  bool resuming_ = false;
  bool help_config_ = false;
  bool report_ = false;
  Config config_;
};

}  // namespace

std::unique_ptr<Subcommand> make_train_subcommand() { return std::make_unique<TrainSubcommand>(); }

}  // namespace annulus
