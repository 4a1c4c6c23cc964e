// The interface of a subcommand, the first word of the command line (`annulus train ...`). Each subcommand has one
// file, subcommands/NAME.cc (subcommand_NAME.cc if every program with ranks has it), and one line of the table in
// subcommands.cc. program.cc finds the subcommand, parses its options and runs it. `launch` also parses the options of
// the subcommand that it will run, so that a typing error is reported once and before any rank starts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/network/network.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace annulus {

class Subcommand {
 public:
  virtual ~Subcommand() = default;
  // Declares the options, and with app.footer() an example that works as typed. Reads no file.
  virtual void declare(CLI::App& app) = 0;
  // Checks what CLI11 cannot. Called after parsing, also by `launch` before any rank starts. Throws Error.
  virtual void check() {}
  // How many of `ranks` ranks form one ring, the ranks of the context axis. The placement of the ranks
  // (launcher/topology/placement.h), which happens before the subcommand runs, depends on it.
  virtual int context(int ranks) const { return ranks; }
  // Throws Error(kPlan or kUsage) if so many ranks cannot run it.
  virtual void require_fit(int /*ranks*/) const {}
  // Whether it takes --resume RUN and reports its checkpoints (launcher/launch/rank.h), so that `launch --restarts` can
  // begin it again.
  virtual bool resumes() const { return false; }
  // What the ranks compute on: "cpu", "cuda", or "auto" (GPUs if a host has one for each of its ranks). The placement
  // depends on this as well.
  virtual std::string device() const { return "cpu"; }
  // The network that the subcommand's options name. Options of `launch` have precedence.
  virtual Network network() const { return {}; }
  // How many folders of logs `launch` keeps (run.keep_logs); 0: all.
  virtual int64_t keep_logs() const { return 0; }
  // The paths, as typed, of files that the ranks read and that must be the same on every host.
  virtual std::vector<std::string> files() const { return {}; }
  // Runs the subcommand and returns the exit code. Throws Error (common/error.h).
  virtual int run() = 0;
};

struct SubcommandEntry {
  std::string_view name;
  std::string_view help;  // one line
  bool ranks;             // may be run by `launch`
  std::unique_ptr<Subcommand> (*make)();
  bool alone = false;             // runs in one process: refused in a job of several ranks
  std::string_view program = {};  // if not empty, the other program that has this subcommand; `make` is then null
  bool hidden = false;            // for internal use: neither listed nor suggested
  std::string_view group = {};    // the heading in `--help` under which it is listed
};

// The subcommands of this program, in the order in which `--help` lists them. Each program defines this function:
// annulus in subcommands.cc, annulus_bench in benchmarks/program/main.cc.
const std::vector<SubcommandEntry>& subcommands();

// Throws Error(kUsage) that names the most similar subcommand if there is none of this name.
const SubcommandEntry& find_subcommand(std::string_view name);

// The result of parsing a command line: a subcommand that is ready to run, or the text that --help prints.
struct ParsedSubcommand {
  std::unique_ptr<Subcommand> subcommand;  // null: print `text` and leave with exit code 0
  std::string text;
};

// Parses and checks the options of a subcommand. Throws Error(kUsage) for an unknown option (the message names the most
// similar one) and for a missing or malformed value. An option that takes a number refuses any text that is not a
// number of its type; nothing is truncated, rounded or wrapped. An empty argument is refused, wherever it stands.
// Applies --log-level and --log-json, which every subcommand has.
ParsedSubcommand parse_subcommand(const SubcommandEntry& entry, const std::vector<std::string>& args);

// Declares an option that takes a list of whole numbers in one word, such as 5,9,2. `numbers` must outlive the parsing.
void add_numbers(CLI::App& app, const std::string& name, std::vector<int64_t>& numbers, const std::string& help);

// Declares an option that may be repeated, each time with one value, of the kind `type`; the help says so. `values`
// must outlive the parsing.
CLI::Option* add_repeated(CLI::App& app, const std::string& name, std::vector<std::string>& values,
                          const std::string& help, const std::string& type);

// Throws Error(kUsage) of the launcher.
[[noreturn]] void refuse_usage(const std::string& message);

// Throws Error(kUsage) for an option that `app` does not have; the message names the most similar option.
[[noreturn]] void refuse_option(std::string_view subcommand, const CLI::App& app, const std::string& option);

// Prints a line of a table of facts, "  name         text", to standard output.
void print_fact(const std::string& name, const std::string& text);

// Each function makes the subcommand of its name.
std::unique_ptr<Subcommand> make_host_subcommand();
std::unique_ptr<Subcommand> make_launch_subcommand();
std::unique_ptr<Subcommand> make_attend_subcommand();
std::unique_ptr<Subcommand> make_evaluate_subcommand();
std::unique_ptr<Subcommand> make_logits_subcommand();
std::unique_ptr<Subcommand> make_train_subcommand();
std::unique_ptr<Subcommand> make_sample_subcommand();
std::unique_ptr<Subcommand> make_checkpoint_subcommand();
std::unique_ptr<Subcommand> make_export_subcommand();
std::unique_ptr<Subcommand> make_fit_subcommand();
std::unique_ptr<Subcommand> make_inspect_subcommand();
std::unique_ptr<Subcommand> make_tokenize_subcommand();
std::unique_ptr<Subcommand> make_pack_subcommand();
std::unique_ptr<Subcommand> make_plan_subcommand();
std::unique_ptr<Subcommand> make_report_subcommand();
std::unique_ptr<Subcommand> make_prove_subcommand();
std::unique_ptr<Subcommand> make_topology_subcommand();
std::unique_ptr<Subcommand> make_selftest_subcommand();
std::unique_ptr<Subcommand> make_doctor_subcommand();
std::unique_ptr<Subcommand> make_version_subcommand();

}  // namespace annulus
