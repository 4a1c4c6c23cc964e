// annulus prove: proves a plan that stands in a file, whoever made it. It runs nothing. `annulus plan --out` writes
// such files; docs/reference/formats.md, "Plans", says how others write them.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "attention/pattern/pattern.h"
#include "attention/proof/plan_form.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/live_line.h"
#include "launcher/subcommands/print_proof.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

class ProveSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_option("plan", file_, "the plan as JSON (docs/reference/formats.md); -: from standard input")
        ->required()
        ->type_name("FILE");
    app.add_flag("--json", json_, "print JSON instead of text");
    app.add_option("--faults", faults_, "show at most so many faults (default: 8)")
        ->type_name("N")
        ->check(CLI::PositiveNumber);
    app.footer(
        "Examples:\n"
        "  ./annulus plan --ranks 4 --length 4096 --heads 8 --out plan.json && ./annulus prove plan.json\n"
        "  ./annulus plan --ranks 4 --length 4096 --heads 8 --out - | ./annulus prove -");
  }

  int run() override {
    const std::string name = file_ == "-" ? "standard input" : file_;
    const auto begin = std::chrono::steady_clock::now();
    const PlanForm plan = read(name);
    if (!json_) print_plan(plan);
    Proof proof;
    {
      LiveLine line;
      proof = prove(plan, faults_, [&](int ranks) {
        line.say("proved " + std::to_string(ranks) + " of " + counted(plan.request.ranks, "rank"));
      });
    }
    const double seconds = seconds_since(begin);
    if (json_) {
      const nlohmann::ordered_json report = {{"holds", proof.holds()},
                                             {"faults", proof.faults},
                                             {"pairs", proof.pairs},
                                             {"transfers", proof.transfers / 2},
                                             {"seconds", seconds}};
      std::printf("%s\n", report.dump(2).c_str());
    } else {
      print_proof(proof, seconds);
      if (proof.holds()) print_held(plan);
    }
    if (proof.holds()) return 0;
    throw Error(ErrorKind::kInternal, "prove", "the plan in " + name + " is wrong, as shown above");
  }

 private:
  PlanForm read(const std::string& name) const {
    const PlanFormSource source{
        name, [](const PatternSpec& spec, const AttentionShape& shape) { return read_block_maps(spec, shape); }};
    if (file_ == "-") return read_plan_form(std::cin, source);
    // Opening a folder succeeds.
    std::error_code ignored;
    if (std::filesystem::is_directory(file_, ignored)) refuse(EISDIR);
    std::ifstream in(file_, std::ios::binary);
    if (!in) refuse(errno);
    try {
      return read_plan_form(in, source);
    } catch (const std::ios_base::failure&) {
      refuse(EIO);
    }
  }
  [[noreturn]] void refuse(int error) const {
    throw Error(kind_of_errno(error), "prove", "cannot read " + file_ + ": " + std::strerror(error));
  }

  static void print_plan(const PlanForm& plan) {
    const AttentionShape& s = plan.request.shape;
    std::printf("batch %lld, heads %lld, kv heads %lld, queries %lld, keys %lld, pattern %s, ranks %d%s%s\n",
                static_cast<long long>(s.batch), static_cast<long long>(s.heads), static_cast<long long>(s.kv_heads),
                static_cast<long long>(s.q_len), static_cast<long long>(s.k_len), shown_pattern(plan).c_str(),
                plan.request.ranks, plan.schedule.empty() ? "" : ", schedule ",
                printable(plan.schedule, /*most=*/60).c_str());
    std::fflush(stdout);
  }

  // A foreign plan may have millions of slices.
  static std::string shown_pattern(const PlanForm& plan) {
    const PatternSpec& spec = plan.request.pattern;
    if (spec.kind == PatternSpec::Kind::kSlices) return "of " + counted(std::ssize(spec.slices), "slice");
    return printable(spec.text(), /*most=*/2000);
  }

  static void print_held(const PlanForm& plan) {
    int64_t ranks = 0;  // that say something
    for (const HeldRows& held : plan.held) {
      ranks += held.forward.any() || held.backward.any();
    }
    if (ranks == 0) return;
    std::printf("%s %s as much as the plan says\n", with_commas(ranks, "rank").c_str(), ranks == 1 ? "holds" : "hold");
  }

  std::string file_;
  bool json_ = false;
  int faults_ = 8;
};

}  // namespace

std::unique_ptr<Subcommand> make_prove_subcommand() { return std::make_unique<ProveSubcommand>(); }

}  // namespace annulus
