// The interface of a verb, the first word of the command line (`annulus train ...`). Each verb has one file,
// verbs/NAME.cc (verb_NAME.cc if every program with ranks has it), and one line of the table in verbs.cc. program.cc
// finds the verb, parses its options and runs it.
// `launch` also parses the options of the verb that it will run, so that a typing error is reported once and before any
// rank starts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/network/network.h"

namespace CLI {
class App;
}

namespace annulus {

class Verb {
 public:
  virtual ~Verb() = default;
  // Declares the options, and with app.footer() an example that works as typed. Reads no file.
  virtual void declare(CLI::App& app) = 0;
  // Checks what CLI11 cannot. Called after parsing, also by `launch` before any rank starts. Throws Error.
  virtual void check() {}
  // How many of `ranks` ranks form one ring, the ranks of the context axis. The placement of the ranks
  // (launcher/topology/placement.h), which happens before the verb runs, depends on it.
  virtual int context(int ranks) const { return ranks; }
  // What the ranks compute on: "cpu", "cuda", or "auto" (GPUs if a host has one for each of its ranks). The placement
  // depends on this as well.
  virtual std::string device() const { return "cpu"; }
  // The network that the verb's options name. Options of `launch` have precedence.
  virtual Network network() const { return {}; }
  // How many folders of logs `launch` keeps (run.keep_logs); 0: all.
  virtual int64_t keep_logs() const { return 0; }
  // The paths, as typed, of files that the ranks read and that must be the same on every host.
  virtual std::vector<std::string> files() const { return {}; }
  // Runs the verb and returns the exit code. Throws Error (common/error.h).
  virtual int run() = 0;
};

struct VerbEntry {
  std::string_view name;
  std::string_view help;  // one line
  bool ranks;             // may be run by `launch`
  std::unique_ptr<Verb> (*make)();
  bool alone = false;             // runs in one process: refused in a job of several ranks
  std::string_view program = {};  // if not empty, the other program that has this verb; `make` is then null
  bool hidden = false;            // for internal use: neither listed nor suggested
  std::string_view group = {};    // the heading in `--help` under which it is listed
};

// The verbs of this program, in the order in which `--help` lists them. Each program defines this function: annulus in
// verbs.cc, annulus_bench in benchmarks/program/main.cc.
const std::vector<VerbEntry>& verbs();

// Throws Error(kUsage) that names the most similar verb if there is none of this name.
const VerbEntry& find_verb(std::string_view name);

// The result of parsing a command line: a verb that is ready to run, or the text that --help prints.
struct ParsedVerb {
  std::unique_ptr<Verb> verb;  // null: print `text` and leave with exit code 0
  std::string text;
};

// Parses and checks the options of a verb. Throws Error(kUsage) for an unknown option (the message names the most
// similar one) and for a missing or malformed value. An option that takes a number refuses any text that is not a
// number of its type; nothing is truncated, rounded or wrapped. An empty argument is refused, wherever it stands.
// Applies --log-level and --log-json, which every verb has.
ParsedVerb parse_verb(const VerbEntry& entry, const std::vector<std::string>& args);

// Declares an option that takes a list of whole numbers in one word, such as 5,9,2. `numbers` must outlive the parsing.
void add_numbers(CLI::App& app, const std::string& name, std::vector<int64_t>& numbers, const std::string& help);

// Throws Error(kUsage) for an option that `app` does not have; the message names the most similar option.
[[noreturn]] void refuse_option(std::string_view verb, const CLI::App& app, const std::string& option);

// Prints a line of a table of facts, "  name         text", to standard output.
void print_fact(const std::string& name, const std::string& text);

// Each function makes the verb of its name.
std::unique_ptr<Verb> make_host_verb();
std::unique_ptr<Verb> make_launch_verb();
std::unique_ptr<Verb> make_attend_verb();
std::unique_ptr<Verb> make_logits_verb();
std::unique_ptr<Verb> make_train_verb();
std::unique_ptr<Verb> make_sample_verb();
std::unique_ptr<Verb> make_checkpoint_verb();
std::unique_ptr<Verb> make_export_verb();
std::unique_ptr<Verb> make_inspect_verb();
std::unique_ptr<Verb> make_tokenize_verb();
std::unique_ptr<Verb> make_pack_verb();
std::unique_ptr<Verb> make_plan_verb();
std::unique_ptr<Verb> make_topology_verb();
std::unique_ptr<Verb> make_selftest_verb();
std::unique_ptr<Verb> make_doctor_verb();
std::unique_ptr<Verb> make_version_verb();

}  // namespace annulus
