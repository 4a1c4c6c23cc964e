// annulus plan: makes the plan of a problem for any number of ranks, proves it, and shows what it costs. It runs
// nothing, and supports every pattern except adaptive block maps, which are selected at each call.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/execution/plan_report.h"
#include "attention/execution/plan_svg.h"
#include "attention/pattern/pattern.h"
#include "attention/plan/choice.h"
#include "attention/plan/timeline.h"
#include "attention/proof/plan_form.h"
#include "common/error.h"
#include "common/files.h"
#include "common/text.h"
#include "common/trace/chrome_trace.h"
#include "launcher/subcommand.h"
#include "launcher/subcommands/live_line.h"
#include "launcher/subcommands/print_proof.h"
#include "launcher/subcommands/shared_options.h"
#include "runtime/tensor_files/block_map_file.h"

namespace annulus {
namespace {

class PlanSubcommand : public Subcommand {
 public:
  void declare(CLI::App& app) override {
    app.add_flag("--no-proof", no_proof_, "do not prove the plan; for very many ranks or positions");
    app.add_flag("--json", json_, "print JSON instead of a table");
    app.add_option("--out", out_,
                   "write the whole plan, every rank's steps, as JSON to FILE, for `annulus prove` and other programs "
                   "(docs/reference/formats.md); -: to standard output, instead of the table")
        ->type_name("FILE");
    app.add_option(
           "--svg", svg_,
           "draw the plan in FILE, for a browser: the mask by ranks and steps, and when ranks compute, send and "
           "receive by the predicted times")
        ->type_name("FILE");
    app.add_option("--trace", trace_,
                   "write the predicted time line of all ranks to FILE, in the form of `attend --trace FILE`, which "
                   "ui.perfetto.dev shows (docs/how-to/monitoring.md)")
        ->type_name("FILE");
    app.option_defaults()->group("Problem");
    app.add_option("--length", length_, "number of tokens of the whole sequence");
    app.add_option("--key-length", key_length_, "number of keys (default: as many as queries)");
    app.add_option(
           "--query-offset", query_offset_,
           "query i has the position i + N (default: 0, which is top-left); bottom-right: the last query has the "
           "position of the last key")
        ->type_name("N");
    app.add_option("--batch", request_.shape.batch, "batch rows (default: 1)");
    app.add_option("--heads", heads_, "query heads (required)");
    app.add_option("--kv-heads", kv_heads_, "kv heads (default: as many as query heads)");
    app.add_option("--head-dim", head_dim_, "head size, to compute bytes (default: 128)")->check(CLI::PositiveNumber);
    app.add_option("--element-bytes", element_bytes_, "bytes of a key or value element, 2 for bf16 (default: 2)")
        ->check(CLI::PositiveNumber);
    app.add_option("--pattern", pattern_,
                   "which keys a query sees: { kind = ..., ... } with " + pattern_kinds() +
                       "; docs/explanation/attention.md has their keys (default: { kind = \"causal\" })");
    app.option_defaults()->group("Ranks");
    app.add_option("--ranks", ranks_, "number of ranks to plan for");
    add_numbers(app, "--lengths", request_.uneven_lengths,
                "contiguous parts of these lengths, one for each rank: 5,9,2; instead of --ranks and --length");
    app.add_option("--layout", layout_,
                   "contiguous, zigzag (default), striped, balanced or per-document; auto: the one that is "
                   "predicted to take least time");
    app.add_flag("--even", request_.even, "refuse lengths that do not give every rank the same share");
    add_schedule_options(app, schedule_, request_.within, machine_);
    app.footer(
        "Examples:\n"
        "  ./annulus plan --ranks 64 --length 1048576 --heads 64 --kv-heads 8\n"
        "  ./annulus plan --ranks 64 --length 1048576 --heads 64 --kv-heads 8 --machine h100 --layout auto\n"
        "  ./annulus plan --lengths 4096,2048,1024 --heads 8 --json\n"
        "  ./annulus plan --ranks 4 --length 4096 --heads 8 --out plan.json --svg plan.svg\n"
        "  ./annulus plan --ranks 4 --length 4096 --heads 8 --trace plan-trace.json\n"
        "  ./annulus plan --ranks 8 --length 65536 --heads 32 --layout contiguous \\\n"
        "      --pattern '{ kind = \"window\", left = 4095, right = 0 }'");
  }

  void check() override {
    place();
    if (!heads_) refuse_usage("plan needs --heads, the number of query heads");
    request_.shape.heads = *heads_;
    request_.shape.k_len = key_length_.value_or(request_.shape.q_len);
    request_.shape.kv_heads = kv_heads_.value_or(request_.shape.heads);
    request_.pattern = parse_pattern(pattern_, "--pattern");
    const std::optional<LayoutKind> layout = parse_layout_or_auto(layout_.value_or("zigzag"), "--layout");
    if (!layout) layouts_ = layouts_of_auto();
    request_.layout = layout.value_or(layouts_of_auto().front());
    request_.schedule = parse_schedule(schedule_, "--schedule");
    request_.terms = terms_of(machine_, "--machine", "cpu", head_dim_, element_bytes_);
    request_.shape.query_offset = parse_query_offset(query_offset_, "--query-offset");
    request_.shape = aligned(request_.shape);
    if (!request_.uneven_lengths.empty()) request_.layout = LayoutKind::kContiguous;
    require_plannable(request_);
    if (json_ && out_ == "-") refuse_usage("--json and --out - both print to standard output; leave one of them out");
    std::vector<std::pair<std::string, std::string>> files;
    for (const auto& [option, file] :
         {std::pair("--svg", svg_), std::pair("--trace", trace_), std::pair("--out", out_ == "-" ? "" : out_)}) {
      if (file.empty()) continue;
      require_output("launcher", option + (" " + file), file);
      for (const auto& [before, other] : files) {
        if (same_file(other, file)) refuse_usage(before + " and " + option + " name the same file; name another one");
      }
      files.emplace_back(option, file);
    }
  }

  int run() override {
    request_.pattern = read_block_maps(request_.pattern, request_.shape);
    PlanPicture picture;
    std::optional<PlanTimeline> timeline;
    PlanReport plan = report(svg_.empty() ? nullptr : &picture, timeline);
    if (!svg_.empty()) write_atomically(FileSystem::real(), svg_, picture.svg());
    if (timeline) write(*timeline, plan);
    const bool table = !json_ && out_ != "-";
    if (table) print_plan(plan);
    const Proof* proof = nullptr;
    if (!no_proof_) {
      LiveLine line;
      proof = &plan.prove([&](const std::string& text) { line.say(text); });
    }
    if (json_) {
      std::printf("%s\n", plan.json().c_str());
    } else if (proof != nullptr) {
      print_proof(*proof, plan.proved_seconds(), table ? stdout : stderr);
    }
    if (proof != nullptr && !proof->holds()) {
      throw Error(ErrorKind::kInternal, "plan", "the plan is wrong, as shown above; please report it");
    }
    return 0;
  }

 private:
  using Put = std::function<void(std::string_view)>;

  // Replaces a file by one that `write` writes piece by piece.
  static void replace(const std::string& path, const std::function<void(const Put& put)>& write) {
    FileSystem& files = FileSystem::real();
    replace_file(files, path, [&](const std::string& beside) {
      const std::unique_ptr<OutputFile> file = files.create(beside);
      write([&](std::string_view text) { file->write(text.data(), text.size()); });
      file->sync();
      file->close();
    });
  }

  // Makes the plan and, rank by rank meanwhile, writes it with --out, adds it to a picture if there is one, and with
  // --trace to its timeline.
  PlanReport report(PlanPicture* picture, std::optional<PlanTimeline>& timeline) const {
    LiveLine line;
    const auto say = [&](const std::string& text) { line.say(text); };
    const auto made = [&](const PlanReport::Take& take) {
      const PlanReport::Take all = [&](const Program& program) {
        if (take) take(program);
        if (picture != nullptr) picture->add(program);
        if (!trace_.empty()) add(timeline, program);
      };
      return PlanReport(request_, head_dim_, element_bytes_, !no_proof_, say, layouts_, all);
    };
    const auto written = [&](const Put& write) {
      PlanFormWriter writer(write);
      PlanReport plan = made([&](const Program& program) { writer.add(program, held_rows(program)); });
      writer.finish();
      return plan;
    };
    if (out_.empty()) return made(nullptr);
    if (out_ == "-") return written([](std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); });
    std::optional<PlanReport> plan;
    replace(out_, [&](const Put& put) { plan.emplace(written(put)); });
    return *std::move(plan);
  }

  void add(std::optional<PlanTimeline>& timeline, const Program& program) const {
    if (!timeline) timeline.emplace(request_.terms->machine, RowBytes{head_dim_, element_bytes_});
    timeline->add(program);
    if (timeline->events() <= kMostTraced) return;
    refuse_usage("--trace would write more than " + with_commas(kMostTraced, "event") + " for " +
                 counted(request_.ranks, "rank") + ", which no viewer shows; plan fewer ranks");
  }

  void write(const PlanTimeline& timeline, const PlanReport& plan) const {
    replace(trace_, [&](const Put& put) {
      put(chrome_head({{"attention", plan.request().text()},
                       {"times", "predicted on " + request_.terms->machine.name + ", none was measured"}}));
      bool first = true;
      for (const TraceRecord& record : timeline.records()) {
        if (!std::exchange(first, false)) put(",\n");
        put(chrome_events(record, {}));
      }
      put(chrome_tail());
    });
  }

  // Sets the number of ranks and positions from --ranks and --length or from --lengths.
  void place() {
    const std::vector<int64_t>& lengths = request_.uneven_lengths;
    if (lengths.empty()) {
      if (!ranks_) refuse_usage("plan needs --ranks, or --lengths with the length of each rank");
      if (!length_) refuse_usage("plan needs --length, or --lengths with the length of each rank");
      request_.ranks = *ranks_;
      request_.shape.q_len = *length_;
      return;
    }
    if (layout_) {
      refuse_usage(
          "--lengths gives each rank a contiguous part, but --layout was given as well; leave one of them out");
    }
    request_.ranks = static_cast<int>(lengths.size());
    if (ranks_ && *ranks_ != request_.ranks) {
      refuse_usage("--lengths has " + counted(request_.ranks, "length") + ", but --ranks says " +
                   std::to_string(*ranks_) + "; leave --ranks out, or give each rank a length");
    }
    int64_t total = 0;
    for (const int64_t n : lengths) {
      if (n < 0 || __builtin_add_overflow(total, n, &total)) {
        refuse_usage(
            "--lengths must be numbers of tokens, 0 or more each, whose sum is the length of the sequence, got " +
            list_text(lengths));
      }
    }
    if (length_ && *length_ != total) {
      refuse_usage("--lengths add up to " + std::to_string(total) + ", but --length says " + std::to_string(*length_) +
                   "; leave --length out");
    }
    request_.shape.q_len = total;
  }

  static void print_costs(const char* direction, const std::vector<PlanCost>& costs) {
    std::printf("%-10s %-28s %14s %14s\n", direction, "of one rank", "least", "most");
    for (const PlanCost& cost : costs) {
      const auto shown = [&](double value) {
        return cost.bytes ? rounded(value / 1e6, 2) : with_commas(static_cast<int64_t>(value));
      };
      const std::string name = std::string(cost.name) + (cost.bytes ? ", MB" : "");
      std::printf("%-10s %-28s %14s %14s\n", "", name.c_str(), shown(cost.least).c_str(), shown(cost.most).c_str());
    }
  }

  static void print_plan(const PlanReport& plan) {
    std::printf("%s\n%s %s counted, %s %% of all\n\n", plan.request().text().c_str(),
                with_commas(plan.pairs(), "pair").c_str(), plan.pairs() == 1 ? "is" : "are",
                significant(100 * plan.share(), 4).c_str());
    print_costs("forward", plan.forward());
    print_costs("backward", plan.backward());
    print_sent(plan);
    const PlanChoice& choice = plan.choice();
    std::printf("\npredicted on %s, forward and backward:\n", choice.request.terms->machine.name.c_str());
    for (const std::string& line : choice.lines()) std::printf("  %s\n", line.c_str());
    std::printf("\nmade in %.3f s, %.2f ms a rank\n", plan.made_seconds(),
                1e3 * plan.made_seconds() / plan.request().ranks);
    std::fflush(stdout);
  }

  static void print_sent(const PlanReport& plan) {
    const PlanReport::Sent& sent = plan.sent();
    if (plan.request().ranks == 1) return;
    const auto mb = [](double bytes) { return rounded(bytes / 1e6, 2) + " MB"; };
    std::printf("\nforward, all ranks: %s sent; schedules that move keys and values alone send at least %s",
                mb(sent.bytes).c_str(), mb(sent.least_of_keys).c_str());
    if (sent.columns > 1) {
      std::printf("; the best tiling, which moves queries as well, sends %s (mesh with --within %d)",
                  mb(sent.least_of_tilings).c_str(), sent.columns);
    }
    std::printf("\n");
  }

  PlanRequest request_;
  std::optional<int> ranks_;
  std::optional<int64_t> length_, key_length_, heads_, kv_heads_;
  std::optional<std::string> layout_;
  int64_t head_dim_ = 128, element_bytes_ = 2;
  static constexpr int64_t kMostTraced = 2'000'000;  // about 500 MB
  std::string pattern_ = "{ kind = \"causal\" }", schedule_ = "auto", query_offset_ = "0", machine_, out_, svg_, trace_;
  std::vector<LayoutKind> layouts_;  // to choose from; empty: the request's own
  bool no_proof_ = false, json_ = false;
};

}  // namespace

std::unique_ptr<Subcommand> make_plan_subcommand() { return std::make_unique<PlanSubcommand>(); }

}  // namespace annulus
