// The program `annulus`: finds the verb, reads its options, runs it, and turns errors into one message and an exit
// code.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "comm/launch_info.h"
#include "common/error.h"
#include "launcher/command_line.h"
#include "launcher/host_plan.h"
#include "launcher/rank.h"
#include "launcher/verb.h"

namespace annulus {
namespace {

std::string overview() {
  std::string text =
      "annulus: exact attention over sequences too long for one device\n\n"
      "  annulus VERB [OPTIONS]\n\n";
  size_t width = 0;
  for (const VerbEntry& entry : verbs()) width = std::max(width, entry.name.size());
  for (const VerbEntry& entry : verbs()) {
    text += "  " + std::string(entry.name) + std::string(width + 3 - entry.name.size(), ' ') + std::string(entry.help) +
            "\n";
  }
  return text +
         "\n`annulus VERB --help` shows the options of a verb and an example.\n"
         "Example:\n  ./annulus launch -n 2 train configs/quickstart.toml\n";
}

// "-np 4" is one option in the MPI world; option parsers read "-n p 4".
std::vector<std::string> with_long_np(std::vector<std::string> args) {
  for (std::string& arg : args) {
    if (arg == "-np") arg = "--np";
    for (const VerbEntry& entry : verbs()) {
      if (arg == entry.name) return args;  // from here on it is the verb's
    }
  }
  return args;
}

// Tensors of the same sizes come and go at every step. glibc would hand each back to the kernel and have it faulted in
// again, page by page; 32 MiB is the most it agrees to keep in one piece.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

int dispatch(std::vector<std::string> args, const LaunchInfo& info) {
  if (args.empty()) {
    std::fputs(overview().c_str(), stderr);
    return static_cast<int>(ErrorKind::kUsage);
  }
  const std::string word = args.front();
  args.erase(args.begin());
  if (word == "--help" || word == "-h" || word == "help") {
    if (word == "help" && !args.empty()) return dispatch({args.front(), "--help"}, info);
    std::fputs(overview().c_str(), stdout);
    return 0;
  }
  const VerbEntry& entry = find_verb(word == "--version" ? "version" : word);
  if (entry.name == "launch" || entry.name == "topology") args = with_long_np(std::move(args));
  ParsedVerb parsed = parse_verb(entry, args);
  if (parsed.verb == nullptr) {
    std::fputs(parsed.text.c_str(), stdout);
    return 0;
  }
  if (entry.ranks && info.launched) {
    const std::optional<int> threads = bind_rank(info);
    // What the user set is meant.
    if (threads && std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(*threads);
  }
  keep_freed_memory();
  return parsed.verb->run();
}

// One line for the user, and the exit code of the table in docs/user-guide.md. LibTorch appends a stack to its
// messages.
int explain_exception(std::string& message, bool& said) {
  try {
    throw;
  } catch (const ReportedError& error) {
    said = true;  // one rank has, for all
    return error.exit_code();
  } catch (const Error& error) {
    message = error.what();
    return error.exit_code();
  } catch (const std::bad_alloc&) {
    message = "[memory] out of memory";
    return static_cast<int>(ErrorKind::kResource);
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
    message = "[torch] " + message.substr(0, message.find('\n'));
    return static_cast<int>(ErrorKind::kInternal);
  } catch (const std::exception& error) {
    message = "[internal] " + std::string(error.what());
    return static_cast<int>(ErrorKind::kInternal);
  }
}

int run(int argc, char** argv) {
  LaunchInfo rank;
  int code = 0;
  std::string message;
  bool said = false;
  try {
    remember_command_line(argc, argv);
    rank = launch_info();
    attach_to_launcher(rank);
    code = dispatch(command_arguments(), rank);
  } catch (...) {
    code = explain_exception(message, said);
  }
  if (attached_to_launcher()) {
    report_exit(code, message, said);
  } else if (!message.empty()) {
    const std::string who = rank.size > 1 ? "rank " + std::to_string(rank.rank) + ": " : "";
    std::fprintf(stderr, "annulus: %s%s\n", who.c_str(), message.c_str());
  }
  if (std::fflush(stdout) != 0 && code == 0) code = static_cast<int>(ErrorKind::kResource);  // a full disk
  return code;
}

}  // namespace
}  // namespace annulus

int main(int argc, char** argv) { return annulus::run(argc, argv); }
