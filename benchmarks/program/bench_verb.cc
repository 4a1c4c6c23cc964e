// The verb `annulus bench`, which compares costs with a baseline within one run, and the options of most of its
// subcommands (ring, train, ...). The measuring itself is in benchmarks/ and its folders.
#include <CLI/CLI.hpp>
#include <iostream>
#include <utility>

#include "benchmarks/gpu/gpu.h"
#include "benchmarks/operator.h"
#include "benchmarks/patterns.h"
#include "benchmarks/program/word.h"
#include "benchmarks/report/compare.h"
#include "benchmarks/report/report.h"
#include "benchmarks/ring.h"
#include "benchmarks/shard.h"
#include "benchmarks/train.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/launch_info.h"
#include "common/error.h"
#include "common/names.h"
#include "common/text.h"
#include "common/version.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/launch/launch.h"
#include "launcher/verb.h"
#include "tensor_files/block_map_file.h"

namespace annulus {
namespace {

class RingWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app =
        bench.add_subcommand("ring", "CPU seconds of a ring over those of one process; its bytes, waiting and memory");
    app->add_option("--length", length_, "tokens of the whole sequence (default: 8192)")->check(CLI::PositiveNumber);
    app->add_option("--heads", heads_, "query heads (default: 8)")->check(CLI::PositiveNumber);
    app->add_option("--kv-heads", kv_heads_, "kv heads (default: 8)")->check(CLI::PositiveNumber);
    app->add_option("--head-dim", head_dim_, "head size (default: 64)")->check(CLI::PositiveNumber);
    app->add_option("--pattern", pattern_, "the keys that a query attends to (default: { kind = \"causal\" })");
    app->add_option("--layout", layout_, "contiguous, zigzag (default) or striped");
    app->add_option("--schedule", schedule_, "ring (default), all-gather, group-cast or auto");
    app->add_option("--repeats,--rounds", repeats_, "turns that count (default: 5)")->check(CLI::PositiveNumber);
    add_json(app, json_);
    app->footer(
        "It starts 4 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench ring");
    return app;
  }

  void check() override {
    options_.request.shape = {1, heads_, kv_heads_, length_, length_, 0};
    options_.request.pattern = parse_pattern(pattern_, "--pattern");
    options_.request.layout = parse_layout(layout_, "--layout");
    options_.request.schedule = parse_schedule(schedule_, "--schedule");
    options_.head_dim = head_dim_;
    options_.repeats = repeats_;
    validate(options_.request);
    validate(options_.request.pattern, options_.request.shape);
    check_json(json_);
  }

  int run() override {
    if (!launch_info().launched) {
      LaunchOptions launch;
      launch.ranks = launch.context = 4;
      launch.program = command_arguments();
      launch.typed = typed_words();
      return run_launch(launch);
    }
    options_.request.pattern = read_block_maps(options_.request.pattern, options_.request.shape);
    Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"benchmark", options_.request.text()}}});
    std::vector<BenchRatio> ratios = run_ring_bench(options_, *job.world, std::cout);
    if (job.world->rank() == 0) write_json(json_, std::move(ratios));
    return 0;
  }

 private:
  int64_t length_ = 8192, heads_ = 8, kv_heads_ = 8, head_dim_ = 64, repeats_ = 5;
  std::string pattern_ = "{ kind = \"causal\" }", layout_ = "zigzag", schedule_ = "ring", json_;
  RingBenchOptions options_;
};

class ShardWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "shard", "a training step whose ranks share its state, compared with one whose ranks hold all of it");
    app->add_option("--layers", options_.layers, "layers (default: 4)")->check(CLI::PositiveNumber);
    app->add_option("--dim", options_.dim, "width, a multiple of 16 (default: 512)")->check(CLI::PositiveNumber);
    app->add_option("--length", options_.context, "tokens of a row (default: 1024)")->check(CLI::PositiveNumber);
    app->add_option("--dtype", options_.dtype, "fp32 (default) or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
    app->add_option("--repeats,--rounds", options_.rounds, "rounds that count (default: 40)")
        ->check(CLI::PositiveNumber);
    add_json(app, json_);
    app->footer(
        "It starts 2 ranks itself if `launch` has not started them.\n"
        "Example:\n  ./annulus bench shard");
    return app;
  }

  void check() override { check_json(json_); }

  int run() override {
    if (!launch_info().launched) {
      LaunchOptions launch;
      launch.ranks = launch.context = 2;
      launch.program = command_arguments();
      launch.typed = typed_words();
      return run_launch(launch);
    }
    Job job = bootstrap({.fingerprint = {{"version", kVersion}, {"benchmark", "shard"}}});
    std::vector<BenchRatio> ratios = run_shard_bench(options_, *job.world, std::cout);
    if (job.world->rank() == 0) write_json(json_, std::move(ratios));
    return 0;
  }

 private:
  ShardBenchOptions options_;
  std::string json_;
};

constexpr const char* kBaselineHelp =
    "a command that measures the same training in another program; the last line of its output is a JSON object with "
    "\"cpu_s_per_1k_tok\"";

class TrainWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "train", "tokens per CPU second for a 3M-parameter Llama; CPU time outside matrix products and attention");
    app->add_option("--repeats,--rounds", options_.steps, "steps that count (default: 5)")->check(CLI::PositiveNumber);
    app->add_option("--threads", options_.threads, "threads (default: 1)")->check(CLI::PositiveNumber);
    app->add_option("--baseline", options_.baseline, kBaselineHelp)->type_name("COMMAND");
    add_json(app, json_);
    app->footer("Example:\n  ./annulus bench train");
    return app;
  }

  void check() override { check_json(json_); }

  int run() override {
    refuse_ranks("train");
    write_json(json_, run_train_bench(options_, std::cout));
    return 0;
  }

 private:
  TrainBenchOptions options_;
  std::string json_;
};

class OperatorWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "operator", "the cost of torch.ops.annulus.attention over that of the C++ call that it makes");
    app->add_option("--length", options_.lengths, "tokens; may be given several times (default: 512 and 8192)")
        ->expected(1)
        ->take_all()
        ->check(CLI::PositiveNumber);
    app->add_option("--seconds", options_.seconds, "seconds to measure each length for (default: 10)")
        ->check(CLI::PositiveNumber);
    add_json(app, json_);
    app->footer("Example:\n  ./annulus bench operator");
    return app;
  }

  void check() override { check_json(json_); }

  int run() override {
    refuse_ranks("operator");
    write_json(json_, run_operator_bench(options_, std::cout));
    return 0;
  }

 private:
  OperatorBenchOptions options_;
  std::string json_;
};

class PatternsWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "patterns", "the cost of attention with each pattern over that of the same call without a mask");
    app->add_option("--length", options_.length, "tokens (default: 16384; the goals hold from there on)")
        ->check(CLI::PositiveNumber);
    app->add_option("--heads", options_.heads, "heads (default: 2)")->check(CLI::PositiveNumber);
    app->add_option("--dim,--head-dim", options_.head_dim, "head size (default: 64)")->check(CLI::PositiveNumber);
    app->add_option("--rounds,--repeats", options_.rounds, "rounds that count (default: 5)")
        ->check(CLI::PositiveNumber);
    app->add_option("--threads", options_.threads, "threads (default: 1)")->check(CLI::PositiveNumber);
    app->add_option("--pattern", options_.patterns, "measure this pattern instead; may be given several times")
        ->expected(1)
        ->take_all();
    add_json(app, json_);
    app->footer(
        "Examples:\n  ./annulus bench patterns\n"
        "  ./annulus bench patterns --pattern '{ kind = \"window\", left = 255, right = 0 }'");
    return app;
  }

  void check() override {
    bench_patterns(options_);
    check_json(json_);
  }

  int run() override {
    refuse_ranks("patterns");
    write_json(json_, run_patterns_bench(options_, std::cout));
    return 0;
  }

 private:
  PatternsBenchOptions options_;
  std::string json_;
};

class GpuWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand(
        "gpu", "on a GPU: attention over LibTorch's operator, a ring over one call, patterns, training steps");
    app->add_option("--part", options_.parts,
                    "measure only this: dense, ring, train, patterns or longest; may be given several times (default: "
                    "all, but train and longest only with --config)")
        ->expected(1)
        ->take_all();
    app->add_option("--length", length_, "tokens (default: 32768; dense: 8192, 16384, 32768)")
        ->check(CLI::PositiveNumber);
    app->add_option("--heads", heads_, "query heads (default: 64)")->check(CLI::PositiveNumber);
    app->add_option("--kv-heads", kv_heads_, "kv heads (default: 8)")->check(CLI::PositiveNumber);
    app->add_option("--head-dim", head_dim_, "head size (default: 128)")->check(CLI::PositiveNumber);
    app->add_option("--kernel", kernel_,
                    "the executor's kernel (default: auto); where it computes with another operator than the baseline, "
                    "figures are marked as invalid");
    app->add_option("--ranks", options_.ranks, "ranks of the simulated ring (default: 8)")->check(CLI::PositiveNumber);
    app->add_option("--rounds,--repeats", rounds_, "rounds that count (default: 7)")->check(CLI::PositiveNumber);
    app->add_option("--config", options_.config, "the TOML file of the model for train and longest")->type_name("FILE");
    app->add_option("--set", options_.sets,
                    "override one key of --config, as --set model.layers=4; may be given several times")
        ->allow_extra_args(false)
        ->type_name("KEY=VALUE");
    app->add_option("--seconds", options_.longest_seconds,
                    "longest tries no length that would take it beyond this many seconds")
        ->check(CLI::PositiveNumber);
    app->add_option("--device", device_, "cuda (default), or cpu: tiny sizes, which only test the program")
        ->check(CLI::IsMember({"cuda", "cpu"}));
    add_json(app, json_);
    app->footer(
        "Examples:\n  ./annulus bench gpu --json gpu.json\n"
        "  ./annulus bench gpu --part dense --length 16384 --heads 32 --kv-heads 32");
    return app;
  }

  void check() override { check_json(json_); }

  std::string device() const override { return device_; }

  int run() override {
    refuse_ranks("gpu");
    const bool cuda = device_ == "cuda";
    if (const std::string shortfall = cuda ? cuda_shortfall(1) : ""; !shortfall.empty()) {
      throw Error(ErrorKind::kUnavailable, "bench",
                  "bench gpu needs a GPU: " + shortfall +
                      "; with --device cpu it runs tiny sizes on the CPU, which only tests the program");
    }
    GpuBenchOptions options = gpu_bench_options(cuda ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
    options.parts = options_.parts;
    options.ranks = options_.ranks;
    options.config = options_.config;
    options.sets = options_.sets;
    options.longest_seconds = options_.longest_seconds;
    if (!kernel_.empty()) options.kernel = parse_kernel(kernel_, "--kernel");
    if (length_ > 0) {
      options.length = length_;
      options.lengths = {length_};
    }
    if (heads_ > 0) options.heads = heads_;
    if (kv_heads_ > 0) options.kv_heads = kv_heads_;
    if (head_dim_ > 0) options.head_dim = head_dim_;
    if (rounds_ > 0) options.rounds = rounds_;
    run_gpu_bench(options, std::cout, [this](const std::vector<BenchRatio>& ratios) { write_json(json_, ratios); });
    return 0;
  }

 private:
  GpuBenchOptions options_;
  int64_t length_ = 0, heads_ = 0, kv_heads_ = 0, head_dim_ = 0, rounds_ = 0;
  std::string device_ = "cuda", kernel_, json_;
};

class AllWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand("all", "ring, train and patterns, with their ratios in one file");
    add_json(app, json_);
    app->get_option("--json")->required();
    app->add_option("--length", length_, "tokens of ring and patterns (default: each one's own)")
        ->check(CLI::PositiveNumber);
    app->add_option("--rounds,--repeats", rounds_, "rounds that count (default: 5)")->check(CLI::PositiveNumber);
    app->add_option("--baseline", baseline_, std::string("for train: ") + kBaselineHelp)->type_name("COMMAND");
    app->footer(
        "Without mpirun it leaves the ring out, and without --baseline the comparison of training.\n"
        "Example:\n  ./annulus bench all --json bench.json");
    return app;
  }

  void check() override { check_json(json_); }

  int run() override {
    refuse_ranks("all");
    std::vector<BenchRatio> ratios;
    std::cout << "== ring\n" << std::flush;
    if (const int code = add_ring(ratios); code != 0) return code;
    std::cout << "\n== train\n" << std::flush;
    TrainBenchOptions train;
    train.steps = rounds_;
    train.baseline = baseline_;
    append(ratios, run_train_bench(train, std::cout));
    std::cout << "\n== patterns\n" << std::flush;
    PatternsBenchOptions patterns;
    patterns.rounds = rounds_;
    if (length_ > 0) patterns.length = length_;
    append(ratios, run_patterns_bench(patterns, std::cout));
    std::cout << "\n" << ratios.size() << " ratios written to " << json_ << std::endl;
    write_json(json_, std::move(ratios));
    return 0;
  }

 private:
  static void append(std::vector<BenchRatio>& to, std::vector<BenchRatio> from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  }

  // Starts ranks of its own for the ring; they write their ratios to a file.
  int add_ring(std::vector<BenchRatio>& ratios) const {
    const ScratchFolder scratch;
    LaunchOptions launch;
    launch.ranks = launch.context = 4;
    launch.program = {"bench", "ring", "--rounds", std::to_string(rounds_), "--json", scratch.file("ring.json")};
    if (length_ > 0) launch.program.insert(launch.program.end(), {"--length", std::to_string(length_)});
    launch.typed = typed_words();
    try {
      if (const int code = run_launch(launch); code != 0) return code;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUnavailable) throw;
      std::cout << "left out: " << error.what() << "\n";
      return 0;
    }
    append(ratios, read_report(scratch.file("ring.json")).ratios);
    return 0;
  }

  std::string json_, baseline_;
  int64_t length_ = 0, rounds_ = 5;
};

class CompareWord : public Word {
 public:
  CLI::App* declare(CLI::App& bench) override {
    CLI::App* const app = bench.add_subcommand("compare", "show which ratios got worse from one file to another");
    app->add_option("OLD", before_, "the earlier file that --json wrote")->required();
    app->add_option("NEW", after_, "the later one")->required();
    app->add_option("--margin", margin_, "the share of the old ratio by which it may change (default: 0.1)")
        ->check(CLI::Range(0.0, 100.0));
    app->footer(
        "A ratio got worse if it grew by more than the margin plus the larger spread of the two. The exit code\n"
        "is 10 if any did.\n"
        "Example:\n  ./annulus bench compare old.json new.json --margin 0.05");
    return app;
  }

  int run() override {
    const BenchReport before = read_report(before_), after = read_report(after_);
    const std::vector<std::string> worse = compare_reports(before, after, margin_, std::cout);
    if (worse.empty()) return 0;
    throw Error(ErrorKind::kRegression, "bench",
                "got worse from " + before_ + " to " + after_ + " by more than is allowed: " + join(worse, ", "));
  }

 private:
  std::string before_, after_;
  double margin_ = 0.1;
};

class BenchVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.require_subcommand(0, 1);
    for (auto& word : words_) word.app = word.word->declare(app);
    app.footer(
        "`annulus bench BENCHMARK --help` shows the options of each.\n"
        "Example:\n  ./annulus bench ring");
  }

  void check() override {
    for (auto& word : words_) {
      if (word.app->parsed()) chosen_ = word.word.get();
    }
    if (chosen_ == nullptr) {
      std::vector<std::string> names;
      for (const auto& word : words_) names.push_back(word.app->get_name());
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
    std::unique_ptr<Word> word;
    CLI::App* app = nullptr;  // alive until check() is done
  };
  template <class... Words>
  static std::vector<Entry> entries() {
    std::vector<Entry> all;
    (all.push_back({std::make_unique<Words>()}), ...);
    all.push_back({make_attention_word()});
    all.push_back({make_comm_word()});
    return all;
  }
  std::vector<Entry> words_ =
      entries<RingWord, TrainWord, ShardWord, OperatorWord, PatternsWord, GpuWord, AllWord, CompareWord>();
  Word* chosen_ = nullptr;
};

}  // namespace

std::unique_ptr<Verb> make_bench_verb() { return std::make_unique<BenchVerb>(); }

}  // namespace annulus
