// The subcommand `annulus bench`, which compares costs with a baseline within one run: the table of its benchmarks, and
// what they have in common. The measuring itself is in benchmarks/ and benchmarks/gpu/.
#include <CLI/CLI.hpp>
#include <array>
#include <filesystem>
#include <iostream>
#include <optional>
#include <sstream>
#include <utility>

#include "benchmarks/benchmark.h"
#include "benchmarks/kept.h"
#include "benchmarks/launched.h"
#include "benchmarks/measure.h"
#include "benchmarks/report.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/bootstrap/launch_info.h"
#include "comm/threads/threads.h"
#include "common/environment.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/subcommand.h"

namespace annulus {
namespace {

struct Measurement {
  const char* name;
  const char* help;
  int ranks;  // that are started if `launch` has not started any; 1: it refuses to run in a job of several; 0: none
  const char* in_all;  // its options in `bench all`, null: it is not in there; R stands for the rounds there, "--length
                       // L" for its length, if any
  std::unique_ptr<Benchmark> (*make)();
};

constexpr std::array<Measurement, 17> kMeasurements = {{
    {"ring", "CPU seconds of a ring over those of one process; its bytes, waiting and memory", 4,
     "--rounds R --length L", make_ring_benchmark},
    {"train", "tokens per CPU second for a 3M-parameter Llama; CPU time outside matrix products and attention", 1,
     "--rounds R", make_train_benchmark},
    {"shard", "a training step whose ranks share its state, compared with one whose ranks hold all of it", 2,
     "--rounds R", make_shard_benchmark},
    {"save", "for how long training stands still for a checkpoint, written while it waits and behind it", 2,
     "--rounds R", make_save_benchmark},
    {"longest", "the longest row that fits into a given memory, planned and confirmed, with and without offload", 2,
     "--memory 60MB --layers 12 --window 32 --rounds R", make_longest_benchmark},
    {"operator", "the cost of torch.ops.annulus.attention over that of the C++ call that it makes", 1,
     "--length 512 --seconds 1", make_operator_benchmark},
    {"patterns", "the cost of attention with each pattern over that of the same call without a mask", 1,
     "--rounds R --length L", make_patterns_benchmark},
    {"attention", "attention on one core, compared with the core's peak and with LibTorch's operator", 1,
     "--length 1024 --dim 64 --mask causal --dtype fp32 --seconds 1", make_attention_benchmark},
    {"comm", "exchanges and collectives between ranks compared with plain MPI, and how long a job takes to start", 2,
     "--rounds R --largest 1048576", make_comm_benchmark},
    {"calibrate", "the rates of kernels and links of this machine, written as the profile by which auto chooses", 2,
     nullptr, make_calibrate_benchmark},
    {"plan", "predicted against measured CPU time of attention by eight patterns and three schedules", 4,
     "--rounds R --length 1024", make_plan_benchmark},
    {"seeds", "the tables of the reports that this project grew out of, ours beside theirs; growth with the length", 0,
     "--rounds R --shorten 16", make_seeds_benchmark},
    {"counts", "bytes, messages, allocations and plans of small cases, which tests compare with those kept", 1, "",
     make_counts_benchmark},
    {"trace", "what the recorder of operations costs a training step while no trace is asked for", 2, "--rounds R",
     make_trace_benchmark},
    {"faults", "what the watch of ranks costs a training step", 2, "--rounds R", make_faults_benchmark},
    {"layouts", "pairs and sent rows of layouts of packed rows, counted over drawn lengths of documents", 1,
     "--ranks 8 --length 131072 --batches R", make_layouts_benchmark},
    {"gpu", "on a GPU: attention over LibTorch's operator, a ring over one call, patterns, training steps", 1, "",
     make_gpu_benchmark},
}};

CLI::Option* add_json(CLI::App& app, std::string& path) {
  return app.add_option("--json", path, "write the ratios to a file that `bench compare` reads")->type_name("FILE");
}

// Raises Error(kUsage or kResource) if the file cannot be written, before minutes are spent on measuring.
void check_json(const std::string& path) {
  if (!path.empty()) require_output("bench", "--json " + path, path);
}

void refuse_ranks(const std::string& word) {
  const LaunchInfo info = launch_info();
  if (info.launched && info.size > 1) {
    throw Error(ErrorKind::kUsage, "bench", word + " runs on one rank; run it without launch: ./annulus bench " + word);
  }
}

// The subcommands are subcommands, too (launcher/subcommand.h).
class MeasureSubcommand : public Subcommand {
 public:
  explicit MeasureSubcommand(const Measurement& measurement) : it_(measurement) {}

  void declare(CLI::App& app) override {
    add_json(app, json_);
    benchmark_->declare(app);
  }

  void check() override {
    benchmark_->check();
    check_json(json_);
  }

  std::string device() const override { return benchmark_->device(); }

  int run() override {
    if (const std::optional<int> code = benchmark_->run_alone(std::cout)) return *code;
    if (it_.ranks == 1) {
      refuse_ranks(it_.name);
      keep(measure());
      return 0;
    }
    if (!launch_info().launched) {
      if (it_.ranks > 0) return launch_ranks(it_.ranks, command_arguments());
      keep(measure());
      return 0;
    }
    Job job =
        bootstrap({.fingerprint = {{"version", kVersion}, {"benchmark", it_.name + (" " + benchmark_->request())}}});
    std::vector<BenchRatio> ratios = benchmark_->run(*job.world, std::cout);
    if (job.world->rank() == 0) keep(std::move(ratios));
    return 0;
  }

  // On one rank.
  std::vector<BenchRatio> measure() {
    if (const std::string shortfall = device() == "cuda" ? cuda_shortfall(1) : ""; !shortfall.empty()) {
      throw Error(ErrorKind::kUnavailable, "bench",
                  "bench gpu needs a GPU: " + shortfall +
                      "; with --device cpu it runs tiny sizes on the CPU, which only tests the program");
    }
    return benchmark_->run(*make_self_communicator(), std::cout);
  }

 private:
  void keep(std::vector<BenchRatio> ratios) const {
    if (!json_.empty()) write_report(report_of(std::move(ratios)), json_);
    if (!benchmark_->wrong().empty()) throw Error(ErrorKind::kInternal, "bench", benchmark_->wrong());
  }

  const Measurement& it_;
  const std::unique_ptr<Benchmark> benchmark_ = it_.make();
  std::string json_;
};

class AllSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    add_json(app, json_)->required();
    app.add_option("--length", length_, "tokens of ring and patterns (default: each one's own)")
        ->check(CLI::PositiveNumber);
    add(app, "--rounds,--repeats", rounds_, "rounds that count");
    add(app, "--baseline", baseline_, std::string("for train: ") + kBaselineHelp)->type_name("COMMAND");
    std::string shorter;
    for (const Measurement& m : kMeasurements) {
      if (m.in_all != nullptr) shorter += std::string("  bench ") + m.name + " " + m.in_all + "\n";
    }
    app.footer("It runs, with R and L as given here:\n" + shorter +
               "Without mpirun it leaves out those that start ranks, without a GPU gpu, and without --baseline the\n"
               "comparison of training.\n"
               "Example:\n  ./annulus bench all --json bench.json");
  }

  void check() override { check_json(json_); }

  int run() override {
    refuse_ranks("all");
    std::vector<BenchRatio> ratios;
    for (const Measurement& m : kMeasurements) {
      if (m.in_all == nullptr) continue;
      std::cout << (&m == kMeasurements.data() ? "" : "\n") << "== " << m.name << " " << join(options_of(m), " ")
                << "\n"
                << std::flush;
      try {
        if (const int code = add_ratios(m, ratios); code != 0) return code;
      } catch (const Error& error) {  // no mpirun, or no GPU
        const bool may_lack = m.ranks > 1 || m.make == make_gpu_benchmark;
        if (error.kind() != ErrorKind::kUnavailable || !may_lack) throw;
        std::cout << "left out: " << error.what() << "\n";
      }
    }
    std::cout << "\n" << ratios.size() << " ratios written to " << json_ << std::endl;
    write_report(report_of(std::move(ratios)), json_);
    return 0;
  }

 private:
  std::vector<std::string> options_of(const Measurement& m) const {
    std::vector<std::string> options;
    std::istringstream words(m.in_all);
    for (std::string word; words >> word;) {
      if (word == "R") word = std::to_string(rounds_);
      if (word == "L" && length_ == 0) {
        options.pop_back();
        continue;
      }
      options.push_back(word == "L" ? std::to_string(length_) : word);
    }
    if (m.make == make_train_benchmark && !baseline_.empty()) {
      options.insert(options.end(), {"--baseline", baseline_});
    }
    return options;
  }

  // As `bench NAME OPTIONS` would. Ranks of a job of their own write their ratios to a file. Returns the exit code.
  int add_ratios(const Measurement& m, std::vector<BenchRatio>& ratios) const {
    std::vector<std::string> words = options_of(m);
    if (m.ranks > 1) {
      const ScratchFolder scratch;
      words.insert(words.begin(), {"bench", m.name});
      words.insert(words.end(), {"--json", scratch.file("ratios.json")});
      if (const int code = launch_ranks(m.ranks, std::move(words)); code != 0) return code;
      for (BenchRatio& r : read_report(scratch.file("ratios.json")).ratios) ratios.push_back(std::move(r));
      return 0;
    }
    CLI::App app;
    MeasureSubcommand subcommand(m);
    subcommand.declare(app);
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // as CLI11 wants them, the last one first
    subcommand.check();
    for (BenchRatio& r : subcommand.measure()) ratios.push_back(std::move(r));
    return 0;
  }

  std::string json_, baseline_;
  int64_t length_ = 0, rounds_ = 5;
};

// The folder of the clone whose script ./annulus started this program, otherwise of the current folder.
std::string kept_folder() {
  const char* const script = text_from_environment("ANNULUS_SCRIPT");
  return (std::filesystem::path(script != nullptr ? script : "").parent_path() / "benchmarks" / "results").string();
}

class CompareSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("FILES", files_, "a file that --json wrote, or an earlier one and a later one: [OLD] NEW")
        ->required()
        ->expected(1, 2);
    app.add_option("--margin", margin_, "the share of OLD's ratio by which NEW's may change (default: 0.1)")
        ->check(CLI::Range(0.0, 100.0));
    app.add_option("--kept", kept_,
                   "the folder of the ratios that are kept for each instruction set (default: benchmarks/results of "
                   "the clone)")
        ->type_name("FOLDER");
    app.add_option("--fail-above", fail_above_,
                   "end with exit code 10 if a ratio of NEW is more than this many times the kept one")
        ->check(CLI::PositiveNumber);
    app.footer(
        "A ratio got worse if it grew by more than the margin plus the larger spread of the two. The exit code\n"
        "is 10 if any did. Then NEW's ratios stand beside those that are kept for its instruction set.\n"
        "Examples:\n  ./annulus bench compare old.json new.json --margin 0.05\n"
        "  ./annulus bench compare new.json --fail-above 1.1");
  }

  int run() override {
    const std::string& path = files_.back();
    std::vector<std::string> worse;
    const auto add_faults = [&](const std::string& what, const std::vector<std::string>& names) {
      if (!names.empty()) worse.push_back(what + ": " + join(names, ", "));
    };
    std::optional<BenchReport> before;
    if (files_.size() == 2) before = read_report(files_.front());
    const BenchReport after = read_report(path);
    const std::string folder = kept_.empty() ? kept_folder() : kept_, &isa = after.machine.isa;
    if (before) {
      add_faults("got worse from " + files_.front() + " to " + path + " by more than is allowed",
                 compare_reports(*before, after, margin_, std::cout));
      std::cout << "\n";
    }
    add_faults(line("more than %g times what is kept in ", fail_above_.value_or(0)) + kept_path(folder, isa),
               compare_with_kept(read_kept(folder, isa), after, fail_above_, std::cout));
    if (worse.empty()) return 0;
    throw Error(ErrorKind::kRegression, "bench", join(worse, "; "));
  }

 private:
  std::vector<std::string> files_;
  std::string kept_;
  std::optional<double> fail_above_;
  double margin_ = 0.1;
};

class BenchSubcommand : public Subcommand {
 public:
  BenchSubcommand() {
    for (const Measurement& m : kMeasurements)
      words_.push_back({m.name, m.help, std::make_unique<MeasureSubcommand>(m)});
    words_.push_back({"all", "every benchmark but calibrate, some in a short form, with their ratios in one file",
                      std::make_unique<AllSubcommand>()});
    words_.push_back(
        {"compare", "show which ratios got worse from one file to another", std::make_unique<CompareSubcommand>()});
  }

  void declare(CLI::App& app) override {
    app.require_subcommand(0, 1);
    for (Entry& word : words_) {
      word.app = app.add_subcommand(word.name, word.help);
      word.subcommand->declare(*word.app);
    }
    app.footer(
        "`annulus bench BENCHMARK --help` shows the options of each.\n"
        "Example:\n  ./annulus bench ring");
  }

  void check() override {
    std::vector<std::string> names;
    for (const Entry& word : words_) {
      names.push_back(word.name);
      if (word.app->parsed()) chosen_ = word.subcommand.get();
    }
    if (chosen_ == nullptr) {
      const std::string last = names.back();
      names.pop_back();
      throw Error(
          ErrorKind::kUsage, "bench",
          "expected a benchmark, one of " + join(names, ", ") + " or " + last + "; example: annulus bench ring");
    }
    chosen_->check();
  }

  std::string device() const override { return chosen_->device(); }

  int run() override { return chosen_->run(); }

 private:
  struct Entry {
    std::string name, help;
    std::unique_ptr<Subcommand> subcommand;
    CLI::App* app = nullptr;  // alive until check() is done
  };
  std::vector<Entry> words_;
  Subcommand* chosen_ = nullptr;
};

}  // namespace

std::unique_ptr<Subcommand> make_bench_subcommand() { return std::make_unique<BenchSubcommand>(); }

}  // namespace annulus
