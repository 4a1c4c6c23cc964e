// annulus sample: text from a trained run. Options only; the work is training/sampler.
#include <CLI/CLI.hpp>

#include "common/interrupt.h"
#include "launcher/tokens/encode_prompt.h"
#include "launcher/verb.h"
#include "training/sampler.h"

namespace annulus {
namespace {

class SampleVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("RUN", options_.run, "a run folder, or the name of a run")->required();
    app.add_option("--runs", options_.root, "where names are looked up (default: runs)")->type_name("FOLDER");
    app.add_option("--step", options_.step, "of the checkpoint (default: the newest)");
    app.add_option("--prompt", options_.prompt, "the text to continue (default: none)");
    app.add_option("--tokens,--bytes", options_.tokens,
                   "how many tokens to write at most, of a run on text bytes (default: 500)");
    app.add_option("--temperature", options_.temperature, "0: always the most likely token (default: 0.8)");
    app.add_option("--top-k", options_.top_k, "choose among so many tokens; 0: all (default: 40)");
    app.add_option("--seed", options_.seed, "the same seed writes the same text (default: 1)");
    app.footer(
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus sample quickstart --prompt \"def \"");
  }

  int run() override {
    install_interrupt_handlers();
    options_.encode = encode_prompt;
    return run_sample(options_);
  }

 private:
  SampleOptions options_;
};

}  // namespace

std::unique_ptr<Verb> make_sample_verb() { return std::make_unique<SampleVerb>(); }

}  // namespace annulus
