// annulus sample: writes text with a model. This file has the options; runtime/inference/sampler.h does the work.
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "comm/bootstrap/bootstrap.h"
#include "common/interrupt.h"
#include "common/names.h"
#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/reported_once.h"
#include "launcher/subcommands/shared_options.h"
#include "launcher/subcommands/start_job.h"
#include "launcher/tokens/tokenizer_process.h"
#include "runtime/inference/sampler.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {
namespace {

class SampleSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("MODEL", options_.run, "a run folder, the name of a run, or a folder in Hugging Face's layout")
        ->required();
    app.option_defaults()->group("Model");
    add_model_options(app, options_);
    app.add_option("--cache", options_.cache,
                   "dtype of cached keys and values: fp32, bf16, or model (default): that of --dtype");
    app.add_option("--context", options_.context,
                   "the most tokens that the model reads at once (default: the longest rows of its training)")
        ->type_name("TOKENS");
    app.option_defaults()->group("Text");
    app.add_option("--prompt", options_.prompt, "the text to continue (default: none)");
    app.add_option("--tokens,--bytes", options_.tokens,
                   "the most tokens to write; for a run on text, the most bytes (default: 500)");
    add_repeated(app, "--stop", options_.stop, "text that ends the output and is not shown", "TEXT");
    app.add_option("--temperature", options_.temperature,
                   "temperature of the sampling; 0 always takes the most likely token (default: 0.8)");
    app.add_option("--top-k", options_.top_k, "choose among this many most likely tokens; 0: all (default: 40)");
    app.add_option("--top-p", options_.top_p,
                   "of these, choose among the most likely ones whose probabilities add up to this (default: 1)");
    app.add_option("--seed", options_.seed, "seed of the sampling: the same seed gives the same text (default: 1)");
    app.option_defaults()->group("Ranks");
    app.add_option("--layout", options_.layout,
                   "how the positions of the prompt are divided among ranks: zigzag (default), contiguous, striped, "
                   "balanced, per-document or auto");
    app.add_flag("--sharded", options_.sharded,
                 "each rank keeps a part of the weights, and gathers those of a layer when it needs them");
    app.add_option("--timeout", options_.timeout, "seconds that a communication may take (default: 300)");
    app.footer(
        "Examples (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus sample quickstart --prompt \"def \"\n"
        "  ./annulus launch -n 2 sample quickstart --prompt \"def \"");
  }

  void check() override { index_of_name(options_.dtype, model_dtypes(), "dtype", "--dtype"); }

  int run() override {
    install_interrupt_handlers();
    const Job job = start_job({{"command", shell_quote(command_arguments())}});
    const WatchedWork watched;
    // What the tokenizer's process says of its failure need not be said again.
    options_.encode = [this](const std::string& folder, const std::string& prompt) {
      return tokenizer_.call([&] { return TokenizerProcess(folder).encode(prompt, /*beginning=*/true); });
    };
    options_.make_table = [this](const std::string& folder) {
      return tokenizer_.call([&] { return make_token_table(folder); });
    };
    options_.terminal = isatty(STDOUT_FILENO) == 1;
    try {
      return run_sample(options_, *job.world, job.local_size);
    } catch (const Error& error) {
      tokenizer_.rethrow(error);
    }
  }

 private:
  SampleOptions options_;
  ReportedOnce tokenizer_;
};

}  // namespace

std::unique_ptr<Subcommand> make_sample_subcommand() { return std::make_unique<SampleSubcommand>(); }

}  // namespace annulus
