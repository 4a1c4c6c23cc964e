// annulus evaluate: how good a model is on data, by position, and what it retrieves from a long context. This file has
// the options; runtime/evaluation/evaluation.h does the work.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include "common/error.h"
#include "common/files.h"
#include "common/interrupt.h"
#include "common/text.h"
#include "common/trace/beat.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/reported_once.h"
#include "launcher/subcommands/shared_options.h"
#include "launcher/subcommands/start_job.h"
#include "launcher/tokens/tokenizer_process.h"
#include "runtime/evaluation/evaluation.h"
#include "runtime/evaluation/report.h"
#include "runtime/tasks/task.h"

namespace annulus {
namespace {

class EvaluateSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("MODEL", options_.model, "a run folder, the name of a run, or a folder in Hugging Face's layout");
    app.option_defaults()->group("Model");
    add_model_options(app, options_);
    app.option_defaults()->group("Losses on data");
    add_repeated(app, "--data", options_.data,
                 "text or token files (a path, a glob, or a table as in data.train), or held-out: the documents that "
                 "the run held out",
                 "FILES");
    app.add_option("--length", options_.length, "tokens of a row (default: the longest rows of the training)");
    app.add_option("--rows", options_.rows, "the most rows of a source, spaced evenly; 0: all (default)");
    app.add_option("--packing", options_.packing,
                   "stream, best-fit or document (default: as the run was trained; for a folder, stream)");
    app.add_option("--documents", options_.documents,
                   "true or false: whether tokens attend only to their own document (default: as the run was trained; "
                   "for a folder, false)")
        ->type_name("BOOL");
    app.option_defaults()->group("Tasks");
    add_repeated(app, "--task", options_.tasks, join(task_names(), ", ") + "; ruler stands for RULER's", "NAME");
    add_numbers(app, "--lengths", options_.lengths,
                "lengths of prompts in tokens, such as 512,1024 (default: the longest rows of the training)");
    add_numbers(app, "--depths", percents_,
                "where in the prompt lies what is asked for, in percent (default: 0,25,50,75,100)");
    app.add_option("--trials", options_.trials, "prompts at each length and depth (default: 10)");
    app.add_option("--seed", options_.seed, "seed of the prompts (default: 1)");
    app.add_option("--pairs", options_.pairs,
                   "for the task kv, keys with a value, spread over the prompt (default: as many as fit)");
    app.add_option("--haystack", options_.haystack, "a text in which needles are hidden (default: synthetic)")
        ->type_name("FILE");
    add_repeated(app, "--needle", options_.needles, "for the task needle, a sentence with {key} and {value}", "TEXT");
    app.add_flag("--generate", options_.generate,
                 "also decode an answer to each prompt, with kernel auto, and say what of it is right");
    app.option_defaults()->group("Results");
    app.add_option("--json", json_, "file to write all numbers to")->type_name("FILE");
    app.add_option("--pictures", pictures_,
                   "folder to write perplexity.svg, perplexity-in-documents.svg and a picture of each task to")
        ->type_name("FOLDER");
    app.add_option("--label", label_, "what pictures call this model (default: MODEL)");
    add_repeated(app, "--beside", beside_, "LABEL=FILE: draw the losses that an earlier --json FILE holds beside these",
                 "LABEL=FILE");
    add_row_options(app, options_.attention, device_);
    app.add_flag("--sharded", options_.sharded,
                 "each rank keeps a part of the weights, and gathers those of a layer when it needs them");
    app.add_option("--timeout", options_.timeout, "seconds that a communication may take (default: 300)");
    app.footer(
        "Example (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus launch -n 2 evaluate quickstart --data held-out --task copy --pictures pictures");
  }

  void check() override {
    check_device_and_dtype("evaluate", device_, options_.dtype);
    if (!percents_.empty()) {
      options_.depths.clear();
      for (const int64_t percent : percents_) options_.depths.push_back(static_cast<double>(percent) / 100);
    }
    check_options(options_);
    for (const std::string& one : beside_) {
      const size_t at = one.find('=');
      if (at == std::string::npos || at == 0 || at + 1 == one.size()) {
        throw Error(ErrorKind::kUsage, "evaluate", "--beside " + one + " should be LABEL=FILE");
      }
    }
    if (!json_.empty()) require_output("evaluate", "--json " + json_, json_);
  }

  std::string device() const override { return device_; }

  int run() override {
    install_interrupt_handlers();
    Job job = start_job({{"command", shell_quote(command_arguments())}});
    const ExpectProgress expected;
    auto opening = std::make_unique<LongPhase>();
    ReportedOnce tokenizer;
    std::shared_ptr<TokenizerProcess> process;
    options_.tokenizer = [&](const std::string& folder) -> EvaluationOptions::Encode {
      process = tokenizer.call([&] { return std::make_shared<TokenizerProcess>(folder); });
      return [&](const std::string& text) {
        return tokenizer.call([&] { return process->encode(text, /*beginning=*/true); });
      };
    };
    options_.make_table = [&](const std::string& folder) {
      return tokenizer.call([&] { return make_token_table(folder); });
    };
    std::optional<EvaluationJob> evaluation;
    std::vector<LabelledResults> runs;
    job.run_together({"evaluate, checking the model and the data", 0}, [&] {
      if (job.rank == 0) {
        runs = read_beside();
        make_folder();
      }
      evaluation.emplace(options_, job.size);
    });
    job.require_agreement(evaluation->fields(), {"evaluate, comparing the model and the data", 0});
    const DeviceChoice choice = choose_devices(job, device_);
    const std::shared_ptr<Communicator> gpus = connect_devices(job, choice);
    EvaluationResults results;
    opening.reset();
    try {
      evaluation->run(gpus ? *gpus : *job.world, job.local_size, choice.device, results);
    } catch (const Error& error) {
      // What has been measured before is not lost.
      if (job.rank == 0 && (!results.sources.empty() || !results.cells.empty())) write(results, std::move(runs));
      tokenizer.rethrow(error);
    }
    job.run_together({"evaluate, writing the results", 0}, [&] {
      if (job.rank == 0) write(results, std::move(runs));
    });
    return results.stopped ? interrupt_exit_code() : 0;
  }

 private:
  std::vector<LabelledResults> read_beside() const {
    std::vector<LabelledResults> runs;
    for (const std::string& one : beside_) {
      const size_t at = one.find('=');
      const std::string file = one.substr(at + 1);
      runs.push_back({one.substr(0, at), results_of_json(read_small_file("evaluate", file), file)});
    }
    return runs;
  }

  void make_folder() const {
    if (pictures_.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(pictures_, error);
    if (error) throw Error(ErrorKind::kResource, "evaluate", "--pictures " + pictures_ + ": " + error.message());
    require_output("evaluate", "--pictures " + pictures_, pictures_ + "/perplexity.svg");
  }

  // `runs` are drawn beside these results.
  void write(const EvaluationResults& results, std::vector<LabelledResults> runs) const {
    std::printf("%s", evaluation_table(results).c_str());
    std::fflush(stdout);
    FileSystem& files = FileSystem::real();
    if (!json_.empty()) write_atomically(files, json_, evaluation_json(results));
    if (pictures_.empty()) return;
    const auto picture = [&](const std::string& name, const std::string& svg) {
      write_atomically(files, pictures_ + "/" + name + ".svg", svg);
    };
    const std::string label = !label_.empty() || runs.empty() ? label_ : options_.model;
    runs.push_back({label, results});
    if (!results.sources.empty()) {
      picture("perplexity", perplexity_svg(runs));
      picture("perplexity-in-documents", perplexity_svg(runs, PositionIn::kDocument));
    }
    for (const std::string& task : evaluated_tasks(results)) {
      picture(task, task_svg(runs.back(), task));
      if (options_.generate) picture(task + "-decoded", task_svg(runs.back(), task, TaskScore::kGenerated));
    }
  }

  EvaluationOptions options_;
  std::vector<int64_t> percents_;
  std::vector<std::string> beside_;
  std::string device_ = "auto", json_, pictures_, label_;
};

}  // namespace

std::unique_ptr<Subcommand> make_evaluate_subcommand() { return std::make_unique<EvaluateSubcommand>(); }

}  // namespace annulus
