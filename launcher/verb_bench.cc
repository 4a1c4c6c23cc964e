// annulus bench: measure, side by side with a baseline, in one run. Options only; the work is benchmarks/.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <iostream>

#include "benchmarks/ring.h"
#include "benchmarks/train.h"
#include "comm/bootstrap.h"
#include "common/error.h"
#include "common/names.h"
#include "common/version.h"
#include "launcher/command_line.h"
#include "launcher/launch.h"
#include "launcher/verb.h"
#include "runtime/block_map_file.h"

namespace annulus {
namespace {

class BenchVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("WHAT", what_, "ring or train")->required();
    app.add_option("--length", length_, "ring: tokens of the whole sequence (default: 8192)")
        ->check(CLI::PositiveNumber);
    app.add_option("--heads", heads_, "ring: query heads (default: 8)")->check(CLI::PositiveNumber);
    app.add_option("--kv-heads", kv_heads_, "ring: kv heads (default: 8)")->check(CLI::PositiveNumber);
    app.add_option("--head-dim", head_dim_, "ring: head size (default: 64)")->check(CLI::PositiveNumber);
    app.add_option("--pattern", pattern_, "ring: which keys a query sees (default: { kind = \"causal\" })");
    app.add_option("--layout", layout_, "ring: contiguous, zigzag (default) or striped");
    app.add_option("--schedule", schedule_, "ring: ring (default), all-gather, group-cast or auto");
    app.add_option("--repeats", repeats_, "turns or steps that count (default: 5)")->check(CLI::PositiveNumber);
    app.add_option("--threads", threads_, "train: threads (default: 1)")->check(CLI::PositiveNumber);
    app.footer(
        "  ring   the ring's CPU seconds over those of one process, bytes, exposed communication, memory; starts its\n"
        "         own 4 ranks where it is not started by launch\n"
        "  train  tokens per CPU second of a 3M-parameter Llama, and the share outside matrix products and attention\n"
        "Example:\n  ./annulus bench ring");
  }

  void check() override {
    index_of_name(what_, {"ring", "train"}, "benchmark", "bench");
    options_.request.shape = {1, heads_, kv_heads_, length_, length_, 0};
    options_.request.pattern = parse_pattern(pattern_, "--pattern");
    options_.request.layout = parse_layout(layout_, "--layout");
    options_.request.schedule = parse_schedule(schedule_, "--schedule");
    options_.head_dim = head_dim_;
    options_.repeats = repeats_;
    validate(options_.request);
    validate(options_.request.pattern, options_.request.shape);
  }

  int run() override {
    const LaunchInfo info = launch_info();
    if (what_ == "train") {
      if (info.launched && info.size > 1) {
        throw Error(ErrorKind::kUsage, "bench",
                    "train measures one rank; run it without launch: ./annulus bench train");
      }
      TrainBenchOptions options;
      options.steps = repeats_;
      options.threads = threads_;
      run_train_bench(options, std::cout);
      return 0;
    }
    if (!info.launched) {
      LaunchOptions launch;
      launch.ranks = 4;
      launch.program = command_arguments();
      launch.typed = typed_command();
      return run_launch(launch);
    }
    options_.request.pattern = read_block_maps(options_.request.pattern, options_.request.shape);
    Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"benchmark", options_.request.text()}}});
    run_ring_bench(options_, *job.world, std::cout);
    return 0;
  }

 private:
  std::string what_;
  int64_t length_ = 8192, heads_ = 8, kv_heads_ = 8, head_dim_ = 64, repeats_ = 5;
  int threads_ = 1;
  std::string pattern_ = "{ kind = \"causal\" }", layout_ = "zigzag", schedule_ = "ring";
  RingBenchOptions options_;
};

}  // namespace

std::unique_ptr<Verb> make_bench_verb() { return std::make_unique<BenchVerb>(); }

}  // namespace annulus
