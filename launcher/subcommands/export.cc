// annulus export: writes a run's model as a folder in Hugging Face's layout. This file has the options and prints the
// results; runtime/huggingface/export.h does the work.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "common/error.h"
#include "common/interrupt.h"
#include "common/logging/log.h"
#include "common/names.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "runtime/huggingface/export.h"
#include "runtime/run/run_folder.h"
#include "runtime/tensor_files/model_dtypes.h"

namespace annulus {
namespace {

class ExportSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("RUN", run_, "a run folder, or the name of a run")->required();
    app.add_option("FOLDER", options_.out, "the folder to make")->required();
    app.add_option("--runs", root_, "folder in which the name of a run is looked up (default: runs)")
        ->type_name("FOLDER");
    app.add_option("--step", options_.step, "step of the checkpoint (default: the newest that is undamaged)");
    app.add_option("--dtype", options_.dtype, "bf16, fp32 or fp64 (default: the dtype that the run computes in)");
    app.add_option("--shard-size", shard_text_,
                   "bytes of tensors that a file has at most: 5GB (default), 500MiB; a larger tensor has its own file")
        ->type_name("BYTES");
    app.add_flag("--leave-pattern", options_.leave_pattern,
                 "export the model even if its family's config.json cannot express its attention patterns; they are "
                 "left out");
    app.footer(
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus export quickstart /tmp/quickstart");
  }

  void check() override {
    const auto refuse = [](const std::string& message) { refuse_usage("export: " + message); };
    if (!options_.dtype.empty()) index_of_name(options_.dtype, model_dtypes(), "dtype", "--dtype");
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
      made = export_model(options_,
                          [](const std::string& reason) { log_warn("export", "skipped a checkpoint: " + reason); });
    } catch (const Error&) {
      if (!interrupted()) throw;
      log_warn("export", "interrupted; nothing is written");
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

std::unique_ptr<Subcommand> make_export_subcommand() { return std::make_unique<ExportSubcommand>(); }

}  // namespace annulus
