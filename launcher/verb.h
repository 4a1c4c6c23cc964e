// Verb: one word of the command line (`annulus train ...`). One file per verb, verb_NAME.cc; the table is in verbs.cc.
// program.cc finds the verb, parses its options and runs it; `launch` parses the options of the verb it is to run, so
// that a typing error is reported once and before any rank starts.
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
  // Declares the options, and with app.footer() an example that works as typed. Reads and opens nothing.
  virtual void declare(CLI::App& app) = 0;
  // Checks beyond what options can say; called after parsing, by `launch` too, before any rank starts. Raises Error.
  virtual void check() {}
  // How many of `ranks` ranks are one ring: those of the context axis. Ranks are placed by it (topology/placement.h)
  // before the verb runs.
  virtual int context(int ranks) const { return ranks; }
  // What its ranks compute on: "cpu", "cuda", or "auto": GPUs where a host has one for each of its ranks. They are
  // placed by this, too.
  virtual std::string device() const { return "cpu"; }
  // The network that its options name; what `launch` is told comes before.
  virtual Network network() const { return {}; }
  // Files that its ranks read, as they are named, and that must be the same on every host.
  virtual std::vector<std::string> files() const { return {}; }
  // Runs it; the return value is the exit code. Errors are raised (common/error.h).
  virtual int run() = 0;
};

struct VerbEntry {
  std::string_view name;
  std::string_view help;  // one line
  bool ranks;             // may be run by `launch`
  std::unique_ptr<Verb> (*make)();
  bool alone = false;             // does nothing that several ranks could share: refused in a job of several
  std::string_view program = {};  // not empty: another program has it, which lies beside this one; `make` is null then
  bool hidden = false;            // not for people: not listed, and no suggestion
};

// The verbs of this program, in the order in which `--help` lists them. Each program defines its own: verbs.cc,
// benchmarks/program/main.cc.
const std::vector<VerbEntry>& verbs();

// Raises Error(kUsage) naming the nearest verb.
const VerbEntry& find_verb(std::string_view name);

// What comes of reading a command line: a verb ready to run, or a text that was asked for (--help).
struct ParsedVerb {
  std::unique_ptr<Verb> verb;  // null: print `text` and leave with exit code 0
  std::string text;
};

// Reads the options of a verb. Raises Error(kUsage): an unknown option (the nearest one is named), a missing or
// malformed value. An option of a number takes a number alone that its type holds: none is cut, rounded or wrapped.
ParsedVerb parse_verb(const VerbEntry& entry, const std::vector<std::string>& args);

// Declares an option that takes whole numbers in one word, 5,9,2, none of them left out. `numbers` outlives the
// parsing.
void add_numbers(CLI::App& app, const std::string& name, std::vector<int64_t>& numbers, const std::string& help);

// The refusal of an option that `app` does not have, naming the nearest.
[[noreturn]] void refuse_option(std::string_view verb, const CLI::App& app, const std::string& option);

// Prints a line of a table of facts, "  name         text", to standard output.
void print_fact(const std::string& name, const std::string& text);

// The constructors of the verbs.
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
