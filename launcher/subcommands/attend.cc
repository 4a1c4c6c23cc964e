// annulus attend: exact attention over tensors in a safetensors file. This file has the options;
// runtime/attend/attend.h does the work.
#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "attention/execution/terms_in_job.h"
#include "attention/pattern/pattern.h"
#include "common/names.h"
#include "common/text.h"
#include "launcher/command_line.h"
#include "launcher/device.h"
#include "launcher/hosts/mpirun.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/shared_options.h"
#include "launcher/subcommands/start_job.h"
#include "runtime/attend/attend.h"

namespace annulus {
namespace {

class AttendSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.option_defaults()->group("Tensors");
    app.add_option("--input", options_.input, "safetensors file with q, k, v (and dout)")->type_name("FILE");
    app.add_option(
           "--random", options_.random,
           "instead of --input: generate inputs, equal for any number of ranks: NAME=VALUE,...; the defaults are " +
               join(split(random_input_defaults(), ','), ", ") +
               "; dtype is f32, f64, bf16 or f16, and magnitude the standard deviation of q and k")
        ->type_name("SIZES");
    app.add_option("--output", options_.output,
                   "safetensors file to write: out, lse (and dq, dk, dv); may be left out with --random")
        ->type_name("FILE");
    app.add_flag("--backward", options_.backward, "also compute the gradients, from the tensor dout");
    app.add_option("--trace", options_.trace,
                   "file to write: what every rank computed, sent and waited for, in Chrome's trace format, which "
                   "ui.perfetto.dev shows (docs/how-to/monitoring.md)")
        ->type_name("FILE");
    app.add_option("--mask-out", options_.mask_out, "safetensors file to write: the block map that was used")
        ->type_name("FILE");
    check_ = app.add_option("--check", options_.check_rows,
                            "compare with dense fp64 attention on one core, and fail if it differs; with rows=N (or "
                            "rows=N,seed=S) N drawn rows and keys alone, on all ranks, at any length")
                 ->expected(0, 1)
                 ->type_name("[rows=N]");
    app.callback([this] { options_.check = check_->count() > 0; });
    app.option_defaults()->group("Attention");
    app.add_option("--pattern", options_.pattern,
                   "which keys a query sees: { kind = ..., ... } with " + pattern_kinds() +
                       "; docs/explanation/attention.md has their keys (default: { kind = \"causal\" })");
    app.add_option("--scale", options_.scale, "factor on q.k (default: 1/sqrt(head size))");
    app.add_option("--softcap", options_.softcap, "soft cap of scores: C tanh(score / C) (default: 0, none)");
    app.add_flag("--sinks", options_.sinks,
                 "a learned logit for each head in the softmax's denominator: the tensor sinks [heads] of --input, or "
                 "drawn with --random; --backward gives dsinks");
    app.add_option(
           "--query-offset", options_.query_offset,
           "query i has the position i + N (default: 0, which is top-left); bottom-right: the last query has the "
           "position of the last key")
        ->type_name("N");
    add_device_option(app, device_);
    app.add_option("--kernel", options_.kernel, "auto (default), cpu, reference, efficient, cudnn, flash2 or flash3");
    app.option_defaults()->group("Ranks");
    app.add_option(
        "--layout", options_.layout,
        "how positions are divided among ranks: zigzag (default), contiguous, striped, balanced or per-document; auto: "
        "the one that is predicted to take least time");
    add_numbers(app, "--lengths", options_.lengths, "contiguous parts of these lengths, one for each rank: 5,9,2");
    app.add_flag("--even", options_.even, "refuse lengths that do not give every rank the same share");
    add_schedule_options(app, options_.schedule, options_.within, options_.machine);
    app.option_defaults()->group("Dropout");
    app.add_option("--dropout", options_.dropout.rate, "share of probabilities to drop (default: 0)");
    app.add_option("--seed", options_.dropout.seed, "seed of the dropout (default: 0)");
    app.add_option("--step", options_.dropout.step, "step that the dropout depends on (default: 0)");
    app.add_option("--layer", options_.dropout.layer, "layer that the dropout depends on (default: 0)");
    app.footer(
        "q is [batch, length, heads, head size], k and v [batch, length, kv heads, head size]; F32, F64, BF16 or F16.\n"
        "Examples:\n"
        "  ./annulus launch -n 4 attend --input in.safetensors --output out.safetensors \\\n"
        "      --pattern '{ kind = \"causal\" }' --layout zigzag --schedule ring --backward\n"
        "  ./annulus launch -n 3 attend --random queries=300,heads=4,kv_heads=2,seed=7 \\\n"
        "      --pattern '{ kind = \"window\", left = 40, right = 0 }' --backward --check\n"
        "  ./annulus launch -n 4 attend --random queries=131072 --backward --check rows=64 \\\n"
        "      --pattern '{ kind = \"window\", left = 255, right = 0 }'");
  }

  void check() override {
    index_of_name(device_, {"auto", "cpu", "cuda"}, "device", "--device");
    check_options(options_);
  }

  std::string device() const override { return device_; }

  std::vector<std::string> files() const override {
    return options_.input.empty() ? std::vector<std::string>() : std::vector<std::string>{options_.input};
  }
  int run() override {
    Job job = start_job({{"command", shell_quote(command_arguments())}});
    const WatchedWork watched;
    std::optional<AttendJob> attend;
    const DeviceChoice choice = choose_devices(job, device_);
    options_.device = choice.device.is_cuda() ? "cuda" : "cpu";
    const int64_t free = least_free_bytes(*job.world, choice.device, {"attend, finding the free memory"});
    job.run_together({"attend, checking the input", 0}, [&] {
      attend.emplace(options_, AttendRanks{job.world->hosts(), free, job.rank});
    });
    job.require_agreement(attend->fields(), {"attend, comparing the input", 0});
    if (!options_.layout && options_.lengths.empty()) warn_of_default_layout("attend", job);
    const std::shared_ptr<Communicator> gpus = connect_devices(job, choice);
    attend->run(gpus ? *gpus : *job.world, choice.device);
    return 0;
  }

 private:
  AttendOptions options_;
  CLI::Option* check_ = nullptr;
  std::string device_ = "auto";
};

}  // namespace

std::unique_ptr<Subcommand> make_attend_subcommand() { return std::make_unique<AttendSubcommand>(); }

}  // namespace annulus
