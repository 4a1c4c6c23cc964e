// The options of `annulus bench comm`; benchmarks/comm/ measures.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <utility>

#include "benchmarks/comm/comm.h"
#include "benchmarks/measure.h"
#include "benchmarks/program/word.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/launch_info.h"
#include "common/error.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/command_line.h"
#include "launcher/launch/launch.h"

namespace annulus {
namespace {

class CommWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "comm", "exchanges and collectives between ranks compared with plain MPI, and how long a job takes to start");
    app->add_option("--part", options_.parts,
                    "measure only this; may be given several times (default: all): " + join(comm_bench_parts(), ", "))
        ->expected(1)
        ->take_all()
        ->check(CLI::IsMember(comm_bench_parts()));
    app->add_option("--smallest", options_.smallest, "bytes of the smallest message, a multiple of 4 (default: 1024)")
        ->check(CLI::PositiveNumber);
    app->add_option("--largest", options_.largest, "bytes of the largest message, at most 4 GiB (default: 67108864)")
        ->check(CLI::PositiveNumber);
    app->add_option("--rounds,--repeats", options_.rounds, "turns that count (default: 7)")->check(CLI::PositiveNumber);
    CLI::Option* const start =
        app->add_flag("--start", start_,
                      "measure instead the time from `launch` to the first step over 2 and 8 ranks, and its stages");
    app->add_option("--start-times", times_, "")->group("");  // for ranks of --start: the file to write
    add_json(app, json_);
    for (const char* ignored : {"--part", "--smallest", "--largest", "--json"})
      start->excludes(app->get_option(ignored));
    app->footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Examples:\n  ./annulus bench comm\n  ./annulus bench comm --start");
    return app;
  }

  void check() override {
    if (options_.smallest % 4 != 0 || options_.largest < options_.smallest) {
      throw Error(ErrorKind::kUsage, "bench",
                  "comm: expected a --smallest that is a multiple of 4 and a --largest of at least that, but got " +
                      std::to_string(options_.smallest) + " and " + std::to_string(options_.largest));
    }
    constexpr int64_t kMost = int64_t{4} << 30;  // plain MPI counts floats in an int
    if (options_.largest > kMost) {
      throw Error(ErrorKind::kUsage, "bench",
                  "comm: expected a --largest of at most " + std::to_string(kMost) + " bytes, but got " +
                      std::to_string(options_.largest));
    }
    check_json(json_);
  }

  int run() override {
    const StartTimes times = start_times_of_process();
    if (!launch_info().launched) {
      if (start_) return measure_starts(times);
      return run_launch(launch_of(2, command_arguments()));
    }
    if (start_) {
      throw Error(ErrorKind::kUsage, "bench",
                  "comm --start starts its ranks itself; run it without launch: ./annulus bench comm --start");
    }
    Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"benchmark", "comm"}}});
    if (!times_.empty()) {
      start_and_step(*job.world, times, times_);
      return 0;
    }
    std::vector<BenchRatio> ratios = run_comm_bench(options_, *job.world, std::cout);
    if (job.world->rank() == 0) write_json(json_, std::move(ratios));
    return 0;
  }

 private:
  static LaunchOptions launch_of(int ranks, std::vector<std::string> program) {
    LaunchOptions launch;
    launch.ranks = launch.context = ranks;
    launch.program = std::move(program);
    launch.typed = typed_words();
    return launch;
  }

  // Prints the fastest start for each number of ranks. `own` holds the times of this process, the launcher.
  int measure_starts(const StartTimes& own) const {
    const ScratchFolder scratch;
    const std::string path = scratch.file("start.json");
    const std::vector<int> sizes{2, 8};
    std::vector<std::pair<double, std::string>> starts(sizes.size(), {1e9, ""});
    for (int64_t round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        const double began = wall_seconds();
        const int code = run_launch(launch_of(sizes[i], {"bench", "comm", "--start-times", path}));
        if (code != 0) return code;
        const StartTimes times = read_start_times(path);
        starts[i] = std::min(starts[i], {times.step - began, start_text(times, began)});
      }
    }
    std::cout << "\nseconds from `launch` to the first step, of the last rank, the quickest of " << options_.rounds
              << " starts; the launcher's own program took " << std::round(100 * (own.program - own.process)) / 100
              << " s to load\n\n  ranks  launch and mpirun  loading  joining  data, model  first step      all\n";
    for (size_t i = 0; i < sizes.size(); ++i) {
      std::printf("  %5d  %s\n", sizes[i], starts[i].second.c_str());
    }
    return 0;
  }

  CommBenchOptions options_;
  bool start_ = false;
  std::string times_, json_;
};

}  // namespace

std::unique_ptr<Word> make_comm_word() { return std::make_unique<CommWord>(); }

}  // namespace annulus
