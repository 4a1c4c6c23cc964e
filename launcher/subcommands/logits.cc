// annulus logits: computes a model's logits, loss and gradients for given tokens. This file has the options;
// runtime/inference/logits.h does the work.
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/shared_options.h"
#include "launcher/subcommands/start_job.h"
#include "runtime/inference/logits.h"

namespace annulus {
namespace {

class LogitsSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.option_defaults()->group("Model");
    app.add_option("--model", options_.model, "a folder in Hugging Face's layout, a run folder, or the name of a run")
        ->type_name("FOLDER_OR_RUN");
    add_model_options(app, options_);
    app.option_defaults()->group("Tensors");
    app.add_option("--input", options_.input, "safetensors file with tokens (and targets)")->type_name("FILE");
    app.add_option("--output", options_.output, "safetensors file to write: logits (and loss, gradients)")
        ->type_name("FILE");
    app.add_flag("--last", options_.last, "write only the logits of the last position");
    app.add_flag("--backward", options_.backward,
                 "also compute the gradient of the loss with respect to each parameter");
    add_row_options(app, options_.rows, device_);
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
    check_device_and_dtype("logits", device_, options_.dtype);
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
