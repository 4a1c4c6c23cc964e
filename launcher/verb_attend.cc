// annulus attend: exact attention over tensors in a safetensors file. Options only; the work is runtime/attend.
#include <CLI/CLI.hpp>
#include <optional>

#include "launcher/command_line.h"
#include "launcher/mpirun.h"
#include "launcher/start_job.h"
#include "launcher/verb.h"
#include "runtime/attend.h"

namespace annulus {
namespace {

class AttendVerb : public Verb {
 public:
  void declare(CLI::App& app) override {
    app.add_option("--input", options_.input, "safetensors file with q, k, v (and dout)")
        ->required()
        ->type_name("FILE");
    app.add_option("--output", options_.output, "safetensors file to write: out, lse (and dq, dk, dv)")
        ->required()
        ->type_name("FILE");
    app.add_option("--pattern", options_.pattern, "which keys a query sees (default: { kind = \"causal\" })");
    app.add_option("--layout", options_.layout, "positions over ranks: contiguous (default), zigzag or striped");
    app.add_option("--schedule", options_.schedule, "ring (default) or all-gather");
    app.add_option("--kernel", options_.kernel, "aten (default) or reference");
    app.add_flag("--backward", options_.backward, "also the gradients, from the tensor dout");
    app.add_option("--scale", options_.scale, "factor on q.k (default: 1/sqrt(head size))");
    app.add_option("--query-offset", options_.query_offset, "query i has the position i + N (default: 0)")
        ->type_name("N");
    app.add_flag("--even", options_.even, "refuse lengths that do not give every rank the same share");
    app.add_option("--lengths", options_.lengths, "contiguous parts of these lengths, one for each rank: 5,9,2")
        ->delimiter(',');
    app.footer(
        "q is [batch, length, heads, head size], k and v [batch, length, kv heads, head size]; F32, F64 or BF16.\n"
        "Example:\n"
        "  ./annulus launch -n 4 attend --input in.safetensors --output out.safetensors \\\n"
        "      --pattern '{ kind = \"causal\" }' --layout zigzag --schedule ring --backward");
  }

  void check() override { check_options(options_); }

  int run() override {
    Job job = start_job({{"command", shell_quote(command_arguments())}});
    std::optional<AttendJob> attend;
    job.run_together({"attend, checking the input", 0}, [&] { attend.emplace(options_, job.size); });
    job.require_agreement(attend->fields(), {"attend, comparing the input", 0});
    attend->run(*job.world);
    return 0;
  }

 private:
  AttendOptions options_;
};

}  // namespace

std::unique_ptr<Verb> make_attend_verb() { return std::make_unique<AttendVerb>(); }

}  // namespace annulus
