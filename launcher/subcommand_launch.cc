// annulus launch: reads its own options and those of the subcommand that it starts; launcher/launch/launch.h does the
// work.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <numeric>
#include <optional>

#include "comm/hosts.h"
#include "common/logging/log_setup.h"
#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/hosts/host_list.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/launch/launch.h"
#include "launcher/program.h"
#include "launcher/subcommand.h"

namespace annulus {
namespace {

constexpr int kMostRanks = 65536;
constexpr int kMostRestarts = 1000;

class LaunchSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.prefix_command();  // arguments after the subcommand's name belong to the subcommand
    app.add_option("-n,--np", ranks_, "number of ranks (also -np; default: all slots of the hosts)")->type_name("N");
    app.add_flag("--dry-run", options_.dry_run,
                 "print the placement and the mpirun command, and start no rank (other hosts are still asked for their "
                 "reports)");
    app.add_option(
        "--log-dir", options_.log_dir,
        "folder for the log files of the ranks; if it holds logs of an earlier job, a new folder in it (default: a "
        "new folder in runs/logs)");
    app.add_option("--timeout-grace", options_.grace_seconds,
                   "seconds that ranks have to stop after Ctrl-C or SIGTERM before they are killed (default: 30)")
        ->type_name("S");
    app.add_option("--stuck-after", options_.stuck_seconds,
                   "seconds without progress after which a rank is named and the job is ended (default: 30; 0: never; "
                   "ten times as long while it loads, begins or saves)")
        ->type_name("S");
    app.add_option("--restarts", options_.restarts,
                   "how often a job of `train` that failed begins again from its newest checkpoint, without the hosts "
                   "that do not answer (default: 0)")
        ->type_name("N");
    app.add_option("--mpi-args", mpi_args_, "further options for mpirun, in quotes");
    app.option_defaults()->group("Hosts");
    app.add_option("--hosts", hosts_,
                   "the hosts on which ranks run, and the slots of each: a:8,b:8 (default: the hosts of the Slurm "
                   "allocation, else this host)")
        ->type_name("LIST");
    app.add_option("--hostfile", hostfile_, "a file that names one host per line: NAME slots=8")->type_name("FILE");
    app.option_defaults()->group("Network");
    app.add_option("--interfaces", interfaces_,
                   "the job's IP interfaces, eth0,eth1, for NCCL, MPI and mpirun itself (default: each chooses)")
        ->type_name("LIST");
    app.add_option("--hcas", hcas_, "the job's RDMA devices, mlx5_0,mlx5_1:1, for NCCL and MPI (default: each chooses)")
        ->type_name("LIST");
    app.add_option(
        "--rank-hca", rank_hca_,
        "the RDMA device that each rank uses: auto (default: NCCL and MPI choose) or nearest (as `topology` shows)");
    app.callback([this, &app] {
      rest_ = app.remaining();
      if (!rest_.empty() && rest_.front() == "--") rest_.erase(rest_.begin());
      if (!rest_.empty() && rest_.front().starts_with("-")) refuse_option("launch", app, rest_.front());
    });
    app.footer(
        "The subcommand and its own options come last.\n"
        "Examples:\n"
        "  ./annulus launch -n 2 train configs/quickstart.toml\n"
        "  ./annulus launch -n 4 --dry-run selftest exchange\n"
        "  ./annulus launch --hosts node1:8,node2:8 train configs/quickstart.toml");
  }

  void check() override {
    set_log_place(host_name(), kNoRank, 0);  // it is no rank
    const std::string usage = "; example: annulus launch -n 2 train configs/quickstart.toml";
    if (!mpi_args_.empty()) options_.mpi_args = shell_split(mpi_args_, "--mpi-args");
    take_hosts();
    if (ranks_.empty() && !options_.hosts) {
      refuse_usage("launch needs the number of ranks, -n N" + usage);
    }
    if (ranks_.empty()) {
      const std::vector<int> slots = ranks_of_hosts(*options_.hosts, 0);
      ranks_ = std::to_string(std::accumulate(slots.begin(), slots.end(), int64_t{0}));
    }
    options_.ranks = number_of_text<int>(ranks_).value_or(0);
    if (options_.ranks < 1 || options_.ranks > kMostRanks) {
      refuse_usage("launch -n takes a whole number of ranks from 1 to " + std::to_string(kMostRanks) + ", not \"" +
                   ranks_ + "\"" + usage);
    }
    if (!(options_.grace_seconds >= 0 && options_.grace_seconds <= 86400)) {
      refuse_usage("launch --timeout-grace takes seconds from 0 to 86400");
    }
    if (!(options_.stuck_seconds == 0 || (options_.stuck_seconds >= 1 && options_.stuck_seconds <= 86400))) {
      refuse_usage("launch --stuck-after takes seconds from 1 to 86400, or 0 for no limit");
    }
    if (options_.hosts) ranks_of_hosts(*options_.hosts, options_.ranks);  // throws if there are more ranks than slots
    if (rest_.empty()) {
      std::vector<std::string> known;
      for (const SubcommandEntry& entry : subcommands()) {
        if (entry.ranks) known.emplace_back(entry.name);
      }
      refuse_usage("launch needs a subcommand to run: one of " + join(known, ", ") + usage);
    }
    const SubcommandEntry& entry = find_subcommand(rest_.front());
    if (!entry.ranks) {
      refuse_usage("`" + std::string(entry.name) + "` runs in one process: run it without `launch -n N`");
    }
    if (!entry.program.empty()) run_other_program(entry);  // that program has its own `launch`
    const Network typed = parse_network(interfaces_, hcas_, rank_hca_.empty() ? "auto" : rank_hca_, "launch");
    for (const Variable& variable : environment_of(typed)) setenv(variable.name.c_str(), variable.value.c_str(), 1);
    if (rank_hca_ == "auto") setenv("ANNULUS_RANK_HCA", "auto", 1);  // overrides the configuration
    // The subcommand's options are parsed here so that a typing error is reported once, before anything starts.
    ParsedSubcommand parsed = parse_subcommand(entry, {rest_.begin() + 1, rest_.end()});
    help_ = parsed.text;
    started_ = std::move(parsed.subcommand);
    if (started_ == nullptr) return;  // --help
    if (options_.restarts != 0) require_restarts(entry);
    options_.context = [this](int ranks) {
      // The ranks themselves say more if the number that was typed does not fit.
      if (ranks != options_.ranks) started_->require_fit(ranks);
      return started_->context(ranks);
    };
    options_.device = started_->device();
    options_.network = network_from_environment(started_->network());
    options_.files = started_->files();
    options_.keep_logs = started_->keep_logs();
    options_.program = rest_;
  }

  int run() override {
    if (!help_.empty()) {
      std::fputs(help_.c_str(), stdout);
      return 0;
    }
    options_.typed = typed_words();
    return run_launch(options_);
  }

 private:
  void require_restarts(const SubcommandEntry& entry) const {
    if (options_.restarts < 0 || options_.restarts > kMostRestarts) {
      refuse_usage("launch --restarts takes a whole number from 0 to " + std::to_string(kMostRestarts) + ", not " +
                   std::to_string(options_.restarts));
    }
    if (!started_->resumes()) {
      refuse_usage("launch --restarts needs a subcommand that writes checkpoints, `train`: `" +
                   std::string(entry.name) + "` would begin again without anything of what it had done");
    }
  }

  void take_hosts() {
    const std::string typed = hosts_ ? "--hosts" : hostfile_ ? "--hostfile" : "";
    if (!typed.empty()) forget_default_hosts();
    const std::string named = hosts_named_by(options_.mpi_args);
    if (!typed.empty() && !named.empty()) {
      refuse_usage("the hosts are named twice, by " + typed + " and, to mpirun, by " + named +
                   "; leave out one of them");
    }
    if (named.empty()) options_.hosts = hosts_of_options(hosts_, hostfile_);
  }

  LaunchOptions options_;
  std::optional<std::string> hosts_, hostfile_;
  std::string ranks_;
  std::string mpi_args_;
  std::string interfaces_, hcas_, rank_hca_;
  std::vector<std::string> rest_;
  std::unique_ptr<Subcommand> started_;  // the subcommand that the ranks run
  std::string help_;
};

}  // namespace

std::unique_ptr<Subcommand> make_launch_subcommand() { return std::make_unique<LaunchSubcommand>(); }

}  // namespace annulus
