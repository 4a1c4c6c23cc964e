// annulus export: a run's model as a folder of Hugging Face's. Options and printing only; the work is
// huggingface/export.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "huggingface/export.h"
#include "launcher/verb.h"
#include "training/run/run_folder.h"

namespace annulus {
namespace {

class ExportVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("RUN", run_, "a run folder, or the name of a run")->required();
    app.add_option("FOLDER", options_.out, "the folder to make")->required();
    app.add_option("--runs", root_, "where names are looked up (default: runs)")->type_name("FOLDER");
    app.add_option("--step", options_.step, "of the checkpoint (default: the newest that is whole)");
    app.add_option("--dtype", options_.dtype, "bf16 or fp32 (default: what the run computes in)");
    app.add_option(
           "--shard-size", shard_text_,
           "5GB, 500MiB: bytes of tensors that a file has at most (a larger tensor has one of its own; default: "
           "5GB)")
        ->type_name("BYTES");
    app.add_flag("--leave-pattern", options_.leave_pattern,
                 "export a model whose attention patterns its family cannot say, without saying them");
    app.footer(
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus export quickstart /tmp/quickstart");
  }

  void check() override {
    const auto refuse = [](const std::string& message) {
      throw Error(ErrorKind::kUsage, "launcher", "export: " + message);
    };
    if (!options_.dtype.empty() && options_.dtype != "bf16" && options_.dtype != "fp32") {
      refuse("--dtype must be bf16 or fp32, got \"" + options_.dtype + "\"");
    }
    if (shard_text_.empty()) return;
    const std::optional<int64_t> bytes = bytes_of_text(shard_text_);
    if (!bytes) refuse("--shard-size must be a number of bytes such as 5GB or 500MiB, got \"" + shard_text_ + "\"");
    options_.shard_bytes = *bytes;
  }

  int run() override {
    install_interrupt_handlers();
    options_.run = find_run(root_, run_);
    ExportedModel made;
    try {
      made = export_model(options_, [](const std::string& reason) {
        std::fprintf(stderr, "passed over a checkpoint: %s\n", reason.c_str());
      });
    } catch (const Error&) {
      if (!interrupted()) throw;
      std::fputs("annulus: interrupted; nothing is written\n", stderr);
      return interrupt_exit_code();
    }
    for (const std::string& file : made.files) std::printf("%s\n", file.c_str());
    std::printf("step %s of %s: %s in %s, context %s\n", with_commas(made.step).c_str(), options_.run.c_str(),
                made.architecture.c_str(), made.dtype.c_str(), with_commas(made.context).c_str());
    for (const std::string& note : made.notes) std::printf("note: %s\n", note.c_str());
    return 0;
  }

 private:
  std::string run_, root_ = "runs", shard_text_;
  ExportOptions options_;
};

}  // namespace

std::unique_ptr<Verb> make_export_verb() { return std::make_unique<ExportVerb>(); }

}  // namespace annulus
