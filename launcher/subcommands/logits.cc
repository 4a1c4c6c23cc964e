// annulus logits: computes a model's logits, loss and gradients for given tokens. This file has the options;
// runtime/inference/logits.h does the work.
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "attention/pattern/pattern.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/schedule_options.h"
#include "launcher/subcommands/start_job.h"
#include "runtime/inference/logits.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {
namespace {

class LogitsSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.option_defaults()->group("Model");
    app.add_option("--model", options_.model, "a folder in Hugging Face's layout, a run folder, or the name of a run")
        ->type_name("FOLDER_OR_RUN");
    app.add_option("--runs", options_.root, "folder in which the name of a run is looked up (default: runs)")
        ->type_name("FOLDER");
    app.add_option("--step", options_.step, "step of the run's checkpoint (default: the newest)");
    app.add_option("--dtype", options_.dtype, "dtype that the model computes in: fp32 (default), bf16 or fp64");
    app.option_defaults()->group("Tensors");
    app.add_option("--input", options_.input, "safetensors file with tokens (and targets)")->type_name("FILE");
    app.add_option("--output", options_.output, "safetensors file to write: logits (and loss, gradients)")
        ->type_name("FILE");
    app.add_flag("--last", options_.last, "write only the logits of the last position");
    app.add_flag("--backward", options_.backward,
                 "also compute the gradient of the loss with respect to each parameter");
    app.option_defaults()->group("Attention");
    app.add_option("--pattern", options_.rows.pattern,
                   "which keys a query sees, in all layers: { kind = ..., ... } with " + pattern_kinds() +
                       "; docs/explanation/attention.md has their keys (default: the model's own)");
    app.add_option("--device", device_, "auto (default: GPUs if there is one for each rank), cpu or cuda");
    app.add_option("--kernel", options_.rows.kernel,
                   "auto (default), cpu, reference, efficient, cudnn, flash2 or flash3");
    app.option_defaults()->group("Ranks");
    app.add_option("--layout", options_.rows.layout,
                   "how positions are divided among ranks: zigzag (default), contiguous, striped or balanced");
    add_schedule_options(app, options_.rows.schedule, options_.rows.within, options_.rows.machine);
    app.add_option("--timeout", options_.timeout,
                   "seconds that a communication, and writing the output, may take (default: 300)");
    app.footer(
        "tokens and targets are [batch, length] int64; targets below 0 do not count. The output has logits [batch,\n"
        "length, vocabulary], loss (the mean over the targets that count), and the gradients by parameter name.\n"
        "Example:\n"
        "  ./annulus launch -n 4 logits --model models/llama --input in.safetensors --output out.safetensors \\\n"
        "      --layout zigzag --backward");
  }

  void check() override {
    index_of_name(device_, {"auto", "cpu", "cuda"}, "device", "--device");
    index_of_name(options_.dtype, model_dtypes(), "dtype", "--dtype");
    if (options_.dtype == "fp64") {
      if (device_ == "cuda") {
        throw Error(ErrorKind::kUsage, "logits", "--dtype fp64 computes on CPUs only: leave --device cuda out");
      }
      device_ = "cpu";
    }
    check_options(options_);
  }

  std::string device() const override { return device_; }

  std::vector<std::string> files() const override {
    return options_.input.empty() ? std::vector<std::string>() : std::vector<std::string>{options_.input};
  }
  int run() override {
    Job job = start_job({{"command", shell_quote(command_arguments())}});
    const WatchedWork watched;
    std::optional<LogitsJob> logits;
    job.run_together({"logits, checking the model and the input", 0}, [&] { logits.emplace(options_, job.size); });
    job.require_agreement(logits->fields(), {"logits, comparing the model and the input", 0});
    if (!options_.rows.layout) warn_of_default_layout("logits", job);
    const DeviceChoice choice = choose_devices(job, device_);
    const std::shared_ptr<Communicator> gpus = connect_devices(job, choice);
    logits->run(gpus ? *gpus : *job.world, job.local_size, choice.device);
    return 0;
  }

 private:
  LogitsOptions options_;
  std::string device_ = "auto";
};

}  // namespace

std::unique_ptr<Subcommand> make_logits_subcommand() { return std::make_unique<LogitsSubcommand>(); }

}  // namespace annulus
