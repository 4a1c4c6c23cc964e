// annulus report: what runs did, as one page for a browser (runtime/report/), or as event files for TensorBoard and
// records for Weights & Biases, for which this process is replaced by the Python program in python/follower/. This file
// has the options.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "common/files.h"
#include "common/text.h"
#include "launcher/python_programs/follower.h"
#include "launcher/python_programs/script.h"
#include "launcher/subcommand.h"
#include "runtime/config/config.h"
#include "runtime/report/live_report.h"
#include "runtime/report/report_page.h"
#include "runtime/report/run_data.h"
#include "runtime/run/run_folder.h"

namespace annulus {
namespace {

class ReportSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("RUN", runs_, "run folders or names of runs; several are laid over each other");
    app.add_option("--runs", root_, "folder in which the name of a run is looked up (default: runs)")
        ->type_name("FOLDER");
    app.option_defaults()->group("A page for a browser");
    out_option_ =
        app.add_option("--out", out_,
                       "file to write the page to (default: report.html in the run's folder; for several runs, "
                       "report.html here)")
            ->type_name("FILE");
    app.option_defaults()->group("Other viewers, instead of the page");
    app.add_flag("--tensorboard", tensorboard_,
                 "write event files into tensorboard/ of the run's folder: scalars, the configuration as text, and "
                 "pictures of evaluations that lie in the folder");
    app.add_flag("--wandb", wandb_,
                 "write records of Weights & Biases into wandb/ of the run's folder, offline; `wandb sync` sends them");
    app.add_flag("--follow", follow_, "go on until the run ends");
    app.footer(
        "Examples (after `./annulus launch -n 2 train configs/quickstart.toml`):\n"
        "  ./annulus report quickstart\n"
        "  ./annulus report quickstart-001 quickstart-002 --out both.html\n"
        "  ./annulus report --tensorboard quickstart --follow\n"
        "\n"
        "The page needs neither a network nor a server: open the file, or send it to someone.\n"
        "`train --report` writes it while a run goes on. Results of `evaluate --json` are shown\n"
        "if their files lie in the run's folder or in evaluations/ below it.");
  }

  void check() override {
    if (runs_.empty()) refuse("which run? Give the folder or the name of one, such as runs/quickstart-001");
    if (!others()) {
      if (follow_) {
        refuse("--follow is for --tensorboard and --wandb; `train --report` writes the page while a run goes on");
      }
      if (!out_.empty()) require_output("report", "--out " + out_, out_);
      return;
    }
    if (runs_.size() > 1) refuse("--tensorboard and --wandb take one run: repeat the command for each");
    if (out_option_->count() > 0) refuse("--out is for the page: leave it out with --tensorboard and --wandb");
  }

  int run() override {
    for (std::string& run : runs_) run = find_run(root_, run);
    if (others()) become_follower(runs_.front());
    std::vector<nlohmann::ordered_json> data;
    for (const std::string& run : runs_) data.push_back(run_data(run));
    const std::string path = !out_.empty() ? out_ : runs_.size() == 1 ? report_path(runs_.front()) : "report.html";
    const std::string page = report_page(data);
    write_atomically(FileSystem::real(), path, page);
    std::printf("%s  (%s, of %s)\n", path.c_str(), bytes_text(static_cast<double>(page.size())).c_str(),
                counted(static_cast<int64_t>(runs_.size()), "run").c_str());
    return 0;
  }

 private:
  [[noreturn]] static void refuse(const std::string& message) { refuse_usage("report: " + message); }

  bool others() const { return tensorboard_ || wandb_; }

  [[noreturn]] void become_follower(const std::string& run) const {
    std::vector<std::string> words = {"--run=" + run};
    if (tensorboard_) words.push_back("--tensorboard");
    if (wandb_) words.push_back("--wandb");
    if (follow_) words.push_back("--follow");
    become(follower_command(words), "report");
  }

  std::vector<std::string> runs_;
  std::string root_ = RunConfig{}.folder, out_;
  bool tensorboard_ = false, wandb_ = false, follow_ = false;
  CLI::Option* out_option_ = nullptr;
};

}  // namespace

std::unique_ptr<Subcommand> make_report_subcommand() { return std::make_unique<ReportSubcommand>(); }

}  // namespace annulus
